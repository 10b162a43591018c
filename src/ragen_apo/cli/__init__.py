"""The command `ragen-apo`. Each verb parses, calls one function of the library, and prints.

    common.py      the application, its console, arguments that are checked
    runs.py        train, warm-start, estimate-values, report, compare, configs, show-prompt
    evaluation.py  evaluate
    worlds.py      play, check, data
    models.py      model, push
    pages.py       view, serve

What this package raises on purpose is shown as one message without a traceback, exit status 2. A
run that is interrupted (Ctrl-C, exit status 130) or terminated (SIGTERM, 143, or SIGHUP, 129) keeps
its last checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cyclopts import CycloptsError

from ragen_apo.cli import evaluation, models, pages, runs, worlds  # noqa: F401 - they define commands
from ragen_apo.cli.common import app
from ragen_apo.console import PrintableConsole, write_line
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.errors import EnvironmentFaultError, RagenApoError, RanksError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["app", "main"]


_KEPT = (
    "Nothing that was saved is lost; train continues with --resume if its run directory is there, "
    "compare and evaluate --api-model with the same command."
)
_MIN_COLUMNS = 20


def main() -> None:
    """The entry point: turns expected errors into messages and exit statuses."""
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) < _MIN_COLUMNS:
        del os.environ["COLUMNS"]  # Cyclopts would lay a help page out for ever
    try:
        with _terminable():
            tokens = [_AT_HOME.sub(_expanded, token) for token in sys.argv[1:]]
            command, arguments, _ = app.parse_args(tokens, exit_on_error=False)
            status = _without_exits(command, *arguments.args, **arguments.kwargs)
    except CycloptsError:
        sys.exit(2)  # it was printed; Cyclopts 4, for Python 3.10, would say 1
    except RanksError as error:  # it names a rank, or is what rank 0 has said
        _fail(str(error), status=2)
    except RagenApoError as error:
        _fail(f"{_own_name()}{_lack(error) or error}", status=2)
    except _Terminated as error:
        _fail(f"terminated. {_KEPT}", status=error.status)
    except KeyboardInterrupt:
        _fail(f"interrupted. {_KEPT}", status=130)
    except BrokenPipeError:
        # Who read the output is gone, as `head` when it has seen enough: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        message = _lack(error) or _problem_of_a_file(error)
        _fail(f"{_own_name()}{message}", status=2)
    except BaseException as error:  # a panic of Rust is no Exception
        if not (message := _lack(error)):
            raise
        _fail(f"{_own_name()}{message}", status=2)
    else:
        if isinstance(status, int):
            sys.exit(status)


_AT_HOME = re.compile(r"\A(--[\w.-]+=)?(~/.*)\Z", re.DOTALL)
"""An argument that is a path in the user's folder. Shells expand none in quotes or after `=`; a `~`
alone is YAML's null."""


def _expanded(found: re.Match[str]) -> str:
    return (found[1] or "") + os.path.expanduser(found[2])


class _Terminated(KeyboardInterrupt):
    """A signal has come that asks for the end, which ends the command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, the first SIGTERM (`docker stop`, a scheduler) or SIGHUP (a closed session) ends the
    command as Ctrl-C does: what it has opened is closed.

    Not where torchrun has started several processes: one that waits for the others does so in
    torch, where no handler gets its turn. Not a signal that is ignored, as after `nohup`, or has a
    handler already. Only the main thread may have handlers. A command that takes it for Ctrl-C and
    goes on to its own end, as `play` does, ends with the signal's status as well.
    """
    come: list[int] = []

    def terminate(number: int, _: object) -> NoReturn:
        come.append(number)
        if number == signal.SIGHUP:  # a shell and the system send it several times
            signal.signal(number, signal.SIG_IGN)
            _leave_terminal()
        else:
            signal.signal(number, signal.SIG_DFL)
        raise _Terminated(number)

    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread() and this_worker().size == 1:
        expected = (signal.SIGTERM, signal.SIGHUP)
        numbers += [each for each in expected if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, terminate)
    try:
        yield
        if come:
            raise _Terminated(come[0])
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _leave_terminal() -> None:
    """Nobody reads a terminal that is gone, and what is written to it would be an error."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # isatty says no when it is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _without_exits(command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What the command returns; code of others must not end it as if all had gone well."""
    try:
        return command(*arguments, **options)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # how click's `main` reports it
            raise error.__context__ from None
        raise EnvironmentFaultError(
            f"code that is not ragen-apo's tried to end the process ({error!r:.80}), most likely "
            "that of the environment; run `ragen-apo check` on it"
        ) from error


def _lack(error: BaseException) -> str:
    """What to do where threads or memory were missing, as its causes say; else nothing."""
    of_threads = next((text for each in _causes(error) if (text := _of_threads(each))), "")
    return of_threads or _of_memory(error)


def _causes(error: BaseException | None, *, handled: bool = True) -> Iterator[BaseException]:
    """The error, what caused it, what caused that, and so on; also what was only being `handled`
    when the next was raised.
    """
    seen: set[int] = set()  # causes may go in a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        of_handler = handled and not error.__suppress_context__
        error = error.__cause__ or (error.__context__ if of_handler else None)


def _of_threads(error: BaseException) -> str:
    """What to do where this error says that the system gave no thread or process."""
    is_refused = (
        isinstance(error, OSError)
        and not isinstance(error.filename, str)
        and (error.errno, error.strerror) == (errno.EAGAIN, os.strerror(errno.EAGAIN))
    )
    if is_refused or "can't start new thread" in str(error) or "ThreadPoolBuild" in str(error):
        return (
            "the system gives this user no further thread or process. `ulimit -u` is the limit "
            "for all processes of the user together, each thread counted; `ulimit -v` may "
            "leave no memory for one. End other processes or ask for a higher limit; a run "
            "goes on with --resume."
        )
    return ""


_MEMORY_MARKS = (
    "can't allocate memory",
    "not enough memory",
    "CUDA out of memory",
    "Cannot allocate memory",
    "ALLOC_FAILED",
)
"""Of what torch raises, on a CPU as a RuntimeError without a class of its own."""


def _of_memory(error: BaseException) -> str:
    """What to do where this error, or what it was raised from, says that there was no more memory,
    of the GPU or of the host; else nothing.
    """
    at_fault = next(filter(_is_of_memory, _causes(error, handled=False)), None)
    if at_fault is None:
        return ""
    reason = next(iter(str(at_fault).strip().splitlines()), "")[:200]
    return (
        f"there is not enough memory{f' ({reason})' if reason else ''}. End other processes. For "
        "`train`, give less to one pass: --training.num_rows where episodes are played, "
        "--training.micro_batch_size where they are trained on, --machine.gradient_checkpointing "
        "true. All three may change with --resume, and nothing that was saved is lost. "
        'docs/troubleshooting.md, "The run needs too much memory", has more.'
    )


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    of_torch = isinstance(error, RuntimeError) and any(mark in text for mark in _MEMORY_MARKS)
    return of_torch or isinstance(error, MemoryError)


def _problem_of_a_file(error: OSError) -> str:
    """Path, reason and what to do, for what the operating system refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {error}. What was saved is whole; free space and --resume."
    if error.filename is None:
        return f"the system refused: {error}."
    from ragen_apo.files import PARTIAL_MARK

    path = Path(str(error.filename).split(PARTIAL_MARK)[0])
    if isinstance(error, PermissionError) and (theirs := _of_somebody_else(path)):
        return (
            f"{path}: {error.strerror}: {theirs}. Ask for the permission, give another path, or "
            "work on a copy of your own (`cp -r`). What was saved before is whole."
        )
    return (
        f"{path}: {error.strerror}. Expected a path that can be read and written; mend it or give "
        "another one. What was saved before is whole."
    )


def _of_somebody_else(path: Path) -> str:
    """Whose the file is, or the folder that it is to be in; nothing where it is this user's."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):  # not there, or hidden by a folder above
            owner = place.lstat().st_uid
            if owner == os.geteuid():
                return ""
            with contextlib.suppress(KeyError):  # a number without a name
                owner = place.owner()
            return f"{'it' if place == path else place} belongs to user {owner}"
    return ""


def _own_name() -> str:
    """Which rank speaks, unless it is the first: what it lacks, the other hosts may have."""
    worker = this_worker()
    return f"{worker.name}: " if worker.rank > 0 else ""


def _fail(message: str, *, status: int) -> None:
    """Says what went wrong, of torchrun's processes the first that fails, and ends this one."""
    speaks = True
    if this_worker().size > 1:
        from ragen_apo.distributed.start import is_first_to_fail

        speaks = is_first_to_fail()
    if speaks:
        write_line(PrintableConsole(stderr=True), f"error: {message}", style="red")
    sys.exit(status)
