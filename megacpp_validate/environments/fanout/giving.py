"""Jobs given to a launcher, each under a name that was written down before."""

from __future__ import annotations

from collections.abc import Sequence

from .collect import forget_cell
from .ends import Ends
from .launcher import JobHeld, JobRefused, Launcher, SchedulerAbsent, SchedulerDown, Work
from .state import Attempt, State


def give(state: State, launcher: Launcher, chosen: Sequence[Work], ends: Ends) -> None:
    """Write down the names first: a job that is given when this is killed is found by its name.

    Raises:
        SchedulerAbsent: neither this one nor later ones were given.
        SchedulerDown: it may have taken the job that it fell silent at: its name will tell. Later ones were not given.
        JobRefused: as where it is absent; the text says how many were given before.
        OSError: a folder cannot be written; as above.
    """
    attempts = [_name(state, work, ends) for work in chosen]
    state.keep()
    for index, (work, attempt) in enumerate(zip(chosen, attempts, strict=True)):
        cell = work.order.cell
        try:
            given = launcher.submit(work, state.try_of(cell, attempt))
        except SchedulerDown as fault:
            _take_back(state, chosen[index + (not isinstance(fault, SchedulerAbsent)) :])
            state.keep()
            raise
        except JobHeld as held:
            _take_back(state, chosen[index:])
            ends.tell(cell, "held", str(held))
            return
        except JobRefused as fault:
            _take_back(state, chosen[index:])
            state.keep()
            raise JobRefused(f"{fault}{_say_given(state)}") from fault
        except OSError:
            _take_back(state, chosen[index:])
            state.keep()
            raise
        state.put_attempt(cell, attempt.model_copy(update={"id": given}))
        ends.tell(cell, "given", given)


def _name(state: State, work: Work, ends: Ends) -> Attempt:
    """The next attempt of a cell; before the first, what an earlier run left of the cell is removed."""
    cell = work.order.cell
    job = state.jobs[cell]
    if not job.tries:
        forget_cell(cell, ends.folder)
    number = job.tries + 1
    attempt = Attempt(number=number, name=state.name_of(cell, number))
    state.jobs[cell] = job.model_copy(update={"attempt": attempt, "tries": number})
    return attempt


def _say_given(state: State) -> str:
    """What goes on where no more is given."""
    given = sum(job.attempt is not None for job in state.jobs.values())
    if not given:
        return ""
    jobs = "1 job that was given before goes" if given == 1 else f"{given} jobs that were given before go"
    return f" {jobs} on: the same command finds them, and Ctrl-C while it runs cancels them."


def _take_back(state: State, works: Sequence[Work]) -> None:
    """Jobs that were named and not given."""
    for work in works:
        job = state.jobs[work.order.cell]
        state.jobs[work.order.cell] = job.model_copy(update={"attempt": None, "tries": job.tries - 1})
