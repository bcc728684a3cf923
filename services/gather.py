"""When a pass is worth a moment's wait: for sessions whose habit it is to ask again within that moment.

Sessions that share a pass get their answers together and ask again together, but never at the same instant.
If the first one back began at once it would run alone, the others would run after it, and so on for ever: two
passes where one would do. One session alone never waits. What is computed is not known here.
"""

SHARE = 0.25
"""Most to wait, as a share of what the last pass took."""

PATIENCE = 2.0
"""A session is given up when it is away for so many times its usual time."""


class Gather:
    """Knows who is away and for how long they usually are."""

    def __init__(self) -> None:
        self._left_at: dict[object, float] = {}  # when each session that is away got its answer
        self._usual: dict[object, float] = {}  # seconds between an answer and the next request

    def asked(self, session: object, now: float) -> None:
        """A session has asked."""
        left_at = self._left_at.pop(session, None)
        if left_at is not None:
            spent = now - left_at
            self._usual[session] = (self._usual.get(session, spent) + spent) / 2

    def answered(self, session: object, now: float) -> None:
        """A session has got its answer."""
        self._left_at[session] = now

    def closed(self, session: object) -> None:
        """A session has ended."""
        self._left_at.pop(session, None)
        self._usual.pop(session, None)

    def deadline(self, ready_at: float, pass_s: float) -> float:
        """Until when to wait; a time that is past means not to.

        Args:
            ready_at: Since when there is something to do.
            pass_s: Seconds that the last pass took.
        """
        latest = ready_at + SHARE * pass_s
        deadline = ready_at
        for session, left_at in self._left_at.items():
            usual = self._usual.get(session)
            if usual is not None and left_at + usual <= latest:
                deadline = max(deadline, min(left_at + PATIENCE * usual, latest))
        return deadline
