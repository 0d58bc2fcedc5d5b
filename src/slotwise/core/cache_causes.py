"""Why a span of a prompt was found in the prefix cache, or had to be computed (`core/prompt_lookup.py`)."""

FOUND = "found"  # on the device
FOUND_IN_HOST = "found_in_host"  # in host memory, and copied back
FOUND_ON_DISK = "found_on_disk"  # in files, and read
RECEIVED = "received"  # another engine computed it
NEW = "new"  # not cached for this tenant, or evicted so long ago that this is forgotten
DIVERGED = "diverged"  # it differs from the nearest cached prompt of the same salt
EVICTED = "evicted"  # it was cached, and its block was given to another request
RESET = "reset"  # it was cached before the cache was reset, or the model slept
OTHER_SALT = "other_salt"  # it is cached under another salt of the same tenant
OTHER_ADAPTER = "other_adapter"  # it is cached for another adapter
LOAD_LIMIT = "load_limit"  # it is in host memory, and a plan loads only so many blocks
TOO_SHORT = "too_short"  # the prompt is shorter than a block, and only full blocks are cached
LAST_BLOCK = "last_block"  # the block of the last token, which is always computed
WHOLE_PROMPT = "whole_prompt"  # the request needs results at every position of its prompt
DISABLED = "disabled"  # prefix caching is off

CAUSES = (FOUND, FOUND_IN_HOST, FOUND_ON_DISK, RECEIVED, NEW, DIVERGED, EVICTED, RESET, OTHER_SALT, OTHER_ADAPTER,
          LOAD_LIMIT, TOO_SHORT, LAST_BLOCK, WHOLE_PROMPT, DISABLED)
NOT_COMPUTED = (FOUND, FOUND_IN_HOST, FOUND_ON_DISK, RECEIVED)
