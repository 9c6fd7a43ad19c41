"""A streaming server that keeps an exact schedule and logs the monotonic clock of each write: the truth that a load
generator's error is measured against.

Chunk j of a request is due at `received + first + j · interval + jitter_j` and carries `lo … hi` tokens; both are
drawn from splitmix64, seeded by the server's seed and the request's `seed` field. `GET /log` returns a line per
request, `number received time:tokens …` (nanoseconds of CLOCK_MONOTONIC, which on Linux is `time.perf_counter`), and
forgets them. Two programs keep the same schedule and log: `exact.c`, built where there is a compiler, and `exact.py`.
"""
