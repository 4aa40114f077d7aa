"""Checkpoints: copies that later steps leave alone, rewinding, forking, the budget."""

import itertools

import mlx.core as mx
import pytest
from helpers.tiny import difference, tiny_model, tokens
from tolerances import MODEL_SPLIT, PACKED_SPLIT

from mlx_kda.cache import latent_cache
from mlx_kda.cache.checkpoints import Checkpoints
from mlx_kda.cache.policy import SPARE
from mlx_kda.context import Context
from mlx_kda.errors import UserError

POLICIES = ["exact", "window:20+3", "int8", "window:16,int4"]
IDS = tokens(400, seed=9)[0].tolist()


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks so short that texts of a few hundred tokens fill several, and tails."""
    monkeypatch.setattr(latent_cache, "FIRST_BLOCK", 64)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_experts=0)


def limit(policy):
    return PACKED_SPLIT if "int" in policy else MODEL_SPLIT


def read(model, ids, policy="exact", **options):
    context = Context(model, policy=policy)
    context.prefill(ids, **options)
    return context


@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_is_not_overwritten(model, policy):
    """40 tokens, a checkpoint, 300 more (over a tail's end), decoding, back: as it was."""
    context = read(model, IDS[:40], policy)
    before = context.logits
    point = context.take()
    held = [mx.array(a) for a in point.snapshot[0]]
    context.prefill(IDS[40:340], step=100)
    list(context.decode(20))
    context.rewind(point)
    assert context.tokens == IDS[:40] and mx.array_equal(context.logits, before)
    assert all(mx.array_equal(a, b) for a, b in zip(point.snapshot[0], held, strict=True))
    # the same place serves a second time, for another text
    for other in (IDS[40:90], IDS[200:230]):
        context.prefill(other)
        assert difference(context.logits, read(model, IDS[:40] + other, policy).logits) < limit(
            policy
        )
        context.rewind(40)


@pytest.mark.parametrize("policy", POLICIES)
def test_rewinding_between_checkpoints_reads_again_from_the_nearest(model, policy):
    context = read(model, IDS, policy, step=50, every=100)
    offsets = [point.offset for point in context.checkpoints]
    assert offsets == [100, 200, 300, 400]
    read_again = []
    context.rewind(250, progress=lambda done, total: read_again.append(total))
    assert read_again[0] == 50 and context.tokens == IDS[:250]
    assert difference(context.logits, read(model, IDS[:250], policy).logits) < limit(policy)
    assert [point.offset for point in context.checkpoints] == [100, 200]
    context.rewind(0)
    assert context.tokens == [] and context.logits is None


def test_a_shared_prefix_is_reused_from_a_checkpoint_only(model):
    """A of 37 tokens, then B that shares 30: what lies at 30 or before is reused."""
    text_b = IDS[:30] + IDS[100:115]
    want = read(model, text_b).logits
    for stops, kept in (((), 0), ((12, 31), 12), ((30,), 30), ((5, 29, 36), 29)):
        context = Context(model)
        context.prefill(IDS[:37], stops=stops)
        assert context.reuse(text_b) == kept
        context.prefill(text_b[kept:])
        assert difference(context.logits, want) < MODEL_SPLIT
    # what goes wrong without: the state of A left in place, only the tokens cut
    wrong = read(model, IDS[:37])
    wrong.prefill(text_b[30:])
    assert difference(wrong.logits, want) > 0.01


def test_reuse_of_the_same_text_and_of_a_shorter_one(model):
    context = read(model, IDS[:60], stops=(20, 50))
    assert context.reuse(IDS[:60]) == 60, "the same text again: nothing to read"
    assert context.reuse(IDS[:50]) == 20, "a checkpoint on the way has no logits to go on from"
    context.prefill(IDS[20:50])
    assert difference(context.logits, read(model, IDS[:50]).logits) < MODEL_SPLIT
    context.take_automatic()
    context.prefill(IDS[50:60])
    assert context.reuse(IDS[:50]) == 50


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_go_their_own_way(model, policy):
    context = read(model, IDS[:300], policy, step=100, stops=(100,))
    other = context.fork()
    context.prefill(IDS[300:340])
    other.prefill(IDS[10:40])
    a, b = list(context.decode(8)), list(other.decode(8))
    assert context.tokens == IDS[:340] + a and other.tokens == IDS[:300] + IDS[10:40] + b
    for one in (context, other):
        assert difference(one.logits, read(model, one.tokens, policy).logits) < limit(policy)
        one.rewind(100)
        assert difference(one.logits, read(model, IDS[:100], policy).logits) < limit(policy)


def test_a_checkpoint_that_is_gone_is_refused(model):
    context = read(model, IDS[:30])
    early = context.take()
    context.prefill(IDS[30:60])
    late = context.take()
    context.rewind(early)
    with pytest.raises(UserError, match="checkpoint at 60 tokens is not valid here"):
        context.rewind(late)
    context.checkpoints.drop(early)
    with pytest.raises(UserError, match="30 tokens"):
        context.rewind(early)
    for wrong in (-1, 31):
        with pytest.raises(UserError, match="cannot rewind"):
            context.rewind(wrong)


def test_checkpoints_say_what_they_hold(model):
    """KDA states and logits are held; exact latents are not, a window's ring is."""
    states = 3 * 4 * 32 * 32 * 4 + 3 * 3 * 3 * 128 * 4
    logits = 128 * 4
    assert read(model, IDS[:200]).take().nbytes == states + logits
    assert read(model, IDS[:200], "int8").take().nbytes == states + logits
    ring = (20 + 3 + SPARE) * (32 + 32) * 4
    assert read(model, IDS[:200], "window:20+3").take().nbytes == states + logits + ring


def add(kept, offset, automatic=True):
    return kept.add(offset, [[mx.zeros((100,))]], None, automatic)


def test_the_budget_thins_the_oldest_first():
    kept = Checkpoints(budget=8 * 400)
    for offset in range(10, 510, 10):
        add(kept, offset)
        assert kept.nbytes <= kept.budget
    offsets = [item.offset for item in kept]
    gaps = [b - a for a, b in itertools.pairwise(offsets)]
    assert len(offsets) == 8 and offsets[-3:] == [480, 490, 500]
    assert offsets[0] < 260, "something is left of the beginning"
    assert gaps[0] == max(gaps) and sum(gaps[:3]) > 3 * sum(gaps[-3:])


def test_what_a_user_took_is_never_thinned():
    kept = Checkpoints(budget=3 * 400)
    mine = add(kept, 5, automatic=False)
    for offset in range(10, 100, 10):
        add(kept, offset)
    assert mine in kept and len(kept) == 3
    add(kept, 90, automatic=False)  # an automatic one at the same place gives way
    assert [item.automatic for item in kept if item.offset == 90] == [False]
    tight = Checkpoints(budget=100)
    add(tight, 10)
    assert len(tight) == 0, "a budget for none keeps none"
    add(tight, 10, automatic=False)
    assert len(tight) == 1
