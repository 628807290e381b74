"""Columns of the arrays that the compiled loop works on, and the roles of engines."""

NOBODY = -1
"""No request, block or engine; a request without a part in a step."""
INPUT, OUTPUT, PREFIX, TARGET, CACHED, GENERATED, PAGES, ENGINE, PREEMPTIONS, CHUNK, ROUNDS, NEXT = range(12)
CONTENT, BLOCKED, REFS, HIT = range(12, 16)
"""Integers of a request. TARGET: tokens whose keys and values precede the next token that is generated; CACHED: those
that are there. PAGES: of keys and values, its own ones. CHUNK: tokens of the prompt in the step that runs, 0 for
generating, NOBODY for no part. ROUNDS: steps that generated. NEXT: the request behind it in a queue. CONTENT: where its
blocks begin among those of all prompts, BLOCKED of them; REFS: how many it refers to (`dse_serving.pages`); HIT: tokens
that were there when it first entered.
"""
OF_REQUEST = 16
ARRIVAL, READY, ADMITTED, FIRST, FINISH, MOVED, SENT, BUSY = range(8)
"""Times of a request [s]. READY: it is given to an engine; SENT: its prompt is whole; MOVED: its keys and values reach
the engine that generates. BUSY: time that all engines have computed until READY.
"""
MOMENTS = 8
TOKENS, SEQUENCES, PAGE, TOTAL, PREFILL_FIRST, CHUNKED, RESERVED, KEPT_FREE, ROLE, DRAFTS, RANKS, ROUTING, STAGES = (
    range(13)
)
UNIT, GATHERED, READS, WAITED, WAITED_TOKENS, REPLAYED = range(13, 19)
"""Integers of a pool of engines. TOKENS: most of a step, of each rank; SEQUENCES: most of all ranks. PAGE: tokens of a
page of keys and values; TOTAL: pages. RESERVED: thousandths of the output whose pages are taken at admission. RANKS:
GPUs or groups of them that share sequences (data-parallel attention). ROUTING: how requests are given to engines.
STAGES: of a pipeline, which has as many batches under way, each with sequences and pages of its own. UNIT: tokens of a
block of a prompt. GATHERED: most steps in which prompts wait until each rank has one; WAITED: until a step has
WAITED_TOKENS. READS: steps without prompts after which requests that came are read. REPLAYED: most tokens of a step
with prompts that graphs replay.
"""
(
    HOST,
    HOST_SEQUENCE,
    OVERLAPPED,
    LAUNCHED,
    ACCEPTANCE,
    DRAFT,
    MOVED_TOKEN,
    MOVED_LATENCY,
    BESIDE,
    LAST,
    REQUEST,
    LATENCY,
    BESIDE_PROMPTS,
    PROMPTS_DRAW,
    GENERATING_TAKES,
    REQUEST_TOKEN,
) = range(16)
"""Numbers of a pool. HOST, HOST_SEQUENCE: time of the host for a step, and more for each sequence [s]; OVERLAPPED: the
GPU runs meanwhile. LAUNCHED: least time of a step with prompts whose kernels the host launches [s]. DRAFT: of one draft
[s]. MOVED_TOKEN: of moving a token's keys and values over a GPU's links [s], of which a share LAST cannot be moved
BESIDE the step that makes them. REQUEST, REQUEST_TOKEN, LATENCY: of the front end, for a request and for each token of
its prompt (`dse_serving.deployment.Scheduler`). BESIDE_PROMPTS: whether one kernel attends for prompts and for
sequences that generate; PROMPTS_DRAW, GENERATING_TAKES: their shares of the HBM's rate and of the CUs.
"""
FREE, HEAD, TAIL, WAITING, RUNNING, STEPS, SENDING, LAST_SENDING, LEAST_FREE, OUTSTANDING = range(10)
IDLE, OLDEST, NEWEST, HELD, SEEN, UNREAD_STEPS = range(10, 16)
"""Integers of an engine: free pages, its queue, sequences, steps so far, transfers under way to it (of an engine of
prompts: whole ones, not yet sent), requests that it was given and has not finished. IDLE: free pages with blocks of
prompts that nobody uses, from the OLDEST to the NEWEST one. HELD: steps in which its prompts have waited for others.
SEEN: requests of its queue that it has read, UNREAD_STEPS after which it has not looked for more.
"""
OF_ENGINE = 16
USERS, OLDER, NEWER = range(3)
"""Integers of a block of prompts on an engine: requests that refer to it, -1 where the engine does not have it; its
neighbours among those without users.
"""
OF_BLOCK = 3
BOTH, PREFILL, DECODE = range(3)
"""Roles."""
ROUND_ROBIN, FEWEST_REQUESTS = range(2)
"""How requests are given to engines."""
LOG_ENGINE, LOG_START, LOG_FINISH, LOG_GENERATING, LOG_PROMPT_TOKENS, LOG_RUNNING, LOG_WAITING = range(7)
LOG_PAGES, LOG_GENERATED = 7, 8
"""Numbers of a step in a log. LOG_ENGINE: row of the engine; LOG_START, LOG_FINISH: times [s]; LOG_GENERATING:
sequences that generate; LOG_PROMPT_TOKENS: tokens of prompts; LOG_RUNNING, LOG_WAITING: requests of the engine;
LOG_PAGES: pages in use when it begins; LOG_GENERATED: tokens generated.
"""
LOGGED = 9
PER_OCTAVE = 4
"""Prompt lengths per power of two at which prefill attention is tabled."""
