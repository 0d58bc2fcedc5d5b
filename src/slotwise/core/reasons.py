"""Reasons why an unfinished request does not run in a step.  Every refusal in a plan has one of them."""

NO_SLOT = "no_slot"  # all slots are in use
NO_ADAPTER_SLOT = "no_adapter_slot"  # the running requests have as many adapters as a step may have
NO_BLOCKS = "no_blocks"  # too few cache blocks
LOAD_LIMIT = "load_limit"  # the plan copies as many blocks from host memory as a plan may
TOKEN_BUDGET = "token_budget"  # the step's token budget is spent
SHORT_STEP = "short_step"  # the token budget is reduced for a tenant that may arrive while the step runs
TIME_BUDGET = "time_budget"  # the step would exceed its time budget
TIER_CAP = "tier_cap"  # the free slots are reserved for other tiers
FIRST_TOKEN = "first_token"  # paused for the prefill of a tenant far behind
OUTRANKED = "outranked"  # preempted: a request that goes before it needed its slot or blocks
TOKEN_PENDING = "token_pending"  # it was preempted, and the token of its last row is in flight
ENDING = "ending"  # its last token is in flight
GRAMMAR_COMPILING = "grammar_compiling"  # its grammar is being compiled
WAITING_FOR_KV = "waiting_for_kv"  # another engine computes its prompt, whose blocks have not arrived
VERIFYING = "verifying"  # its drafts, or the token that drafts are to follow, are in flight
MICRO_BATCH = "micro_batch"  # it is in another step in flight, or left to the next one, for another stage
PROMPTS_ALONE = "prompts_alone"  # the step computes new prompts only
BATCH_RUNNING = "batch_running"  # a static batch admits no request while it runs
WINDOW_OPEN = "window_open"  # a dynamic batch is still being collected
ONE_AT_A_TIME = "one_at_a_time"  # another request is running alone
