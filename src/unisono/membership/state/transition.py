"""From one state to the next."""

from unisono.membership.state.change import Change
from unisono.membership.state.deadline import excused
from unisono.membership.state.event import Action, Event
from unisono.membership.state.events import hear
from unisono.membership.state.state import State
from unisono.membership.state.transitions import settle


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """What becomes of a state by an event.

    Args:
        state: before it.
        event: the event.
        now: its time in seconds, not before the last event.

    Returns:
        the state after it, and what is to be done, in this order, once the state is where it outlasts the
        coordinator.
    """
    change = Change(excused(state, now), now)
    hear(change, event)
    settle(change)
    return change.state, tuple(change.actions)
