"""The laws of blocks: each is free or held, by as many as took hold of it, and the lowest free ones go first."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bloomery.infer.blocks import Blocks, blocks_for
from bloomery.models.pads import BLOCK_PLACES


class Holding(RuleBasedStateMachine):
    """Some who take, share and let go, told apart by the lists of what they hold."""

    @initialize(capacity=st.integers(0, 9))
    def begin(self, capacity: int) -> None:
        self.blocks, self.hands = Blocks(), list[list[int]]()
        self.blocks.grow(capacity)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        free = sorted(self.blocks._free)
        count = data.draw(st.integers(0, len(free)))
        taken = self.blocks.take(count)
        assert taken == free[:count], "the lowest first"
        self.hands.append(taken)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.hands:
            hand = data.draw(st.sampled_from(self.hands))
            shared = hand[: data.draw(st.integers(0, len(hand)))]
            self.blocks.hold(shared)
            self.hands.append(shared)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.hands:
            hand = self.hands[data.draw(st.integers(0, len(self.hands) - 1))]
            left = data.draw(st.integers(0, len(hand)))
            self.blocks.let_go(hand[left:])
            del hand[left:]

    @rule(more=st.integers(0, 5))
    def grow(self, more: int) -> None:
        self.blocks.grow(self.blocks.capacity + more)

    @rule(spare=st.integers(0, 3))
    def close_ranks(self, spare: int) -> None:
        held = sorted(self.blocks.held)
        numbers = self.blocks.close_ranks(len(held) + spare)
        assert numbers == dict(zip(held, range(1, len(held) + 1), strict=True))
        self.hands = [[numbers[block] for block in hand] for hand in self.hands]

    @invariant()
    def none_is_lost_or_doubled(self) -> None:
        if hasattr(self, "blocks"):
            holders = Counter(block for hand in self.hands for block in hand)
            assert {block: self.blocks.holders(block) for block in self.blocks.held} == holders
            assert sorted([*self.blocks._free, *self.blocks.held]) == list(range(1, self.blocks.capacity + 1))
            assert self.blocks.free == self.blocks.capacity - len(self.blocks.held)


TestHolding = Holding.TestCase
TestHolding.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(st.integers(0, 10_000))
def test_blocks_hold_all_tokens_and_none_is_for_nothing(tokens):
    assert 0 <= blocks_for(tokens) * BLOCK_PLACES - tokens < BLOCK_PLACES
