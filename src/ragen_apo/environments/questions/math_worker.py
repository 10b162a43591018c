"""The process that compares with math-verify: a JSON line in, `true` or `false` out.

It ends when its input does. It also ends if an answer takes more than `CPU_SECONDS` of processor
time. The signal for this cannot be caught, so no computation in C outlives it. It may also end if
an answer takes too much memory. `math_process` then counts the answer as `not equal` and starts
another process.
"""

import contextlib
import functools
import json
import signal
from collections.abc import Callable
from typing import Any

from ragen_apo.environments.toolkit.line_process import answering

CPU_SECONDS = 2.0
MAX_MEMORY_BYTES = 2 << 30
READY = "ready"


def main() -> None:
    """Answers lines until there are no more."""
    lines, answers = answering()
    _limit_memory()
    is_equal = _load()
    print(READY, file=answers, flush=True)
    for line in lines:
        answer, right = json.loads(line)
        with _limited_time():
            equal = is_equal(answer, right)
        print(json.dumps(equal), file=answers, flush=True)


def _load() -> Callable[[str, str], bool]:
    from math_verify import (  # pyright: ignore[reportMissingImports]
        LatexExtractionConfig,
        parse,
        verify,
    )

    # Plain expressions would go through `eval`, and of several numbers the last would count.
    latex = (LatexExtractionConfig(),)

    @functools.lru_cache(maxsize=64)
    def parsed(text: str) -> list[Any]:
        found = parse(
            f"${text}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=0
        )
        return list(found)

    def is_equal(answer: str, right: str) -> bool:
        try:
            return bool(verify(parsed(right), parsed(answer), timeout_seconds=0))
        except Exception:  # noqa: BLE001 - sympy raises anything, and what it cannot read is not equal
            return False

    return is_equal


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not everywhere
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, hard))


@contextlib.contextmanager
def _limited_time() -> Any:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
