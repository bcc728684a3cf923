"""Everything a run measures, in order: what is compared takes turns within the same minutes.

It does not measure; a unit is one measurement that can be recorded and, after an interruption, left out.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from deploy.bench.order import turn_order
from deploy.bench.records import Key, Records
from deploy.bench.settings import OWN_SIZES, PEER_SAMPLINGS, PLAIN, Settings
from deploy.bench.ways import Way


@dataclass(frozen=True, slots=True)
class Unit:
    """One measurement.

    Attributes:
        key: Its key among the records: the part, who is measured, and the circumstances.
        group: What it is measured side by side with; a group that was cut short is measured again as a whole.
        cost: Units with the same one take about as long.
    """

    key: Key
    group: Key
    cost: Key

    @property
    def part(self) -> str:
        """What is measured."""
        return str(self.key[0])

    @property
    def subject(self) -> str:
        """Who is measured: the name of a way, or for the forward pass alone the label of a variant."""
        return str(self.key[1])

    @property
    def case(self) -> str:
        """Under which circumstances, as far as some models or servers do not allow them."""
        if self.part == "sessions":
            return f"{self.key[3]} sessions"
        if self.part == "speculation" and self.key[3]:
            return f"{self.key[3]} nodes"
        return f"{self.part} at {self.key[2]}" if self.part in ("prefill", "verify") else self.part


def own_ways(settings: Settings) -> list[Way]:
    """The served pipeline's ways, in the order of the settings."""
    return [Way(mode, variant.label) for variant in settings.variants for mode in settings.modes]


def plain_ways(settings: Settings) -> list[Way]:
    """One way of plain decoding for each variant."""
    return [Way(PLAIN, variant.label) for variant in settings.variants]


def peer_ways(settings: Settings) -> list[Way]:
    """The peers."""
    return [Way(peer) for peer in settings.peers]


def draft_sizes(settings: Settings, mode: str) -> list[int]:
    """Most nodes in a draft, for each size that a mode is counted with; 0: the server's or its own setting.

    The first one is the size that the mode is timed with.
    """
    if mode in OWN_SIZES:
        return [0]
    return list(dict.fromkeys([settings.max_nodes or 0, *settings.budgets]))


def all_units(settings: Settings, num_prompts: int) -> list[Unit]:
    """Every measurement of a run, in order."""
    by_part: dict[str, Iterator[Unit]] = {
        "generate": _generate_units(settings, num_prompts),
        "prefill": _prefill_units(settings),
        "sessions": _session_units(settings),
        "verify": _verify_units(settings),
        "quality": _quality_units(settings, num_prompts),
        "speculation": _speculation_units(settings, num_prompts),
    }
    return [unit for part, units in by_part.items() if part in settings.parts for unit in units]


def pending(units: Sequence[Unit], records: Records, skipped: Collection[str]) -> list[Unit]:
    """The units still to be measured: all those of a group of which one is missing.

    Args:
        units: All of a run.
        records: What there is.
        skipped: Subjects and cases that are left out.
    """
    wanted = [unit for unit in units if unit.subject not in skipped and unit.case not in skipped]
    open_groups = {unit.group for unit in wanted if unit.key not in records}
    return [unit for unit in wanted if unit.group in open_groups]


def _generate_units(settings: Settings, num_prompts: int) -> Iterator[Unit]:
    own, peers = own_ways(settings), peer_ways(settings)
    num_rounds = -(-settings.num_pairs // num_prompts)
    for round_ in range(num_rounds):
        for prompt in range(num_prompts):
            for sampling in settings.samplings:
                ways = [*own, *peers] if sampling in PEER_SAMPLINGS else own
                for way in turn_order(ways, round_ * num_prompts + prompt):
                    key = ("generate", way.name, sampling, prompt, round_)
                    yield Unit(key, ("generate", sampling, prompt, round_), key[:3])


def _prefill_units(settings: Settings) -> Iterator[Unit]:
    ways = [*plain_ways(settings), *peer_ways(settings)]
    for round_ in range(settings.num_pairs):
        for length in settings.prompt_lengths:
            for way in turn_order(ways, round_):
                key = ("prefill", way.name, length, round_)
                yield Unit(key, ("prefill", length, round_), key[:3])


def _session_units(settings: Settings) -> Iterator[Unit]:
    cases = [(way, count) for way in own_ways(settings) for count in settings.session_counts]
    for round_ in range(settings.num_pairs):
        for sampling in settings.samplings:
            for way, count in turn_order(cases, round_):
                key = ("sessions", way.name, sampling, count, round_)
                yield Unit(key, ("sessions", sampling, round_), key[:4])


def _verify_units(settings: Settings) -> Iterator[Unit]:
    labels = [variant.label for variant in settings.variants]
    for context in settings.contexts:
        cases = [("verify", label, context, count) for label in labels for count in settings.row_counts]
        if context == settings.contexts[0]:
            # Beside the shortest context, where attention is least of what is left.
            cases += [("linear", label, context, 1) for label in labels]
        for round_ in range(settings.num_pairs):
            for case in turn_order(cases, round_):
                yield Unit((*case, round_), ("verify", context, round_), case)


def _quality_units(settings: Settings, num_prompts: int) -> Iterator[Unit]:
    for prompt in range(num_prompts):
        for variant in settings.variants:
            key = ("quality", variant.label, prompt)
            yield Unit(key, key, key[:2])


def _speculation_units(settings: Settings, num_prompts: int) -> Iterator[Unit]:
    # Prompt by prompt, so that a run that is cut short has something of everything.
    for prompt in range(num_prompts):
        for sampling in settings.samplings:
            for way in own_ways(settings):
                for max_nodes in draft_sizes(settings, way.mode):
                    key = ("speculation", way.name, sampling, max_nodes, prompt)
                    yield Unit(key, key, key[:4])
