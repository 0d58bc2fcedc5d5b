"""Why a request that could run does not run in a step.  Every refusal in a plan has one of these."""

NO_SLOT = "no_slot"  # every slot is taken
NO_BLOCKS = "no_blocks"  # the cache has no room for it
TOKEN_BUDGET = "token_budget"  # the step's tokens are spent
SHORT_STEP = "short_step"  # the step is kept short for a tenant that may come while it runs
TIME_BUDGET = "time_budget"  # the step would take longer than it may
TIER_CAP = "tier_cap"  # the slots that are free are kept for another tier
FIRST_TOKEN = "first_token"  # the step is left to one who waits for its first token, of a tenant far behind
OUTRANKED = "outranked"  # it gave its slot to one that goes before it
ENDING = "ending"  # its last token is already in flight
PROMPTS_ALONE = "prompts_alone"  # the step belongs to prompts
BATCH_RUNNING = "batch_running"  # nobody joins a batch of whole requests once it runs
WINDOW_OPEN = "window_open"  # a batch is being collected
ONE_AT_A_TIME = "one_at_a_time"  # somebody has the machine to itself
