"""Several models in one budget."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from safetensors.torch import save_file

import swapper
from infer.small import CONFIG, TOKENS, make, on_meta, total_bytes
from swapper.bench.plain import GptConfig
from swapper.infer.infer_hooks import PassPredictor
from swapper.integrations.transformers import from_pretrained

SMALL = GptConfig(vocabulary=512, context=32, layers=2, width=256)
BUDGET = "8MiB"


@pytest.fixture
def files(tmp_path):
    save_file(make().state_dict(), tmp_path / "target.safetensors")
    save_file(make(config=SMALL).state_dict(), tmp_path / "draft.safetensors")
    return tmp_path / "target.safetensors", tmp_path / "draft.safetensors"


def load_both(files, budget=BUDGET):
    with swapper.shared_memory(budget):
        target = swapper.load(on_meta(), files[0])
        draft = swapper.load(on_meta(SMALL), files[1])
    return target, draft


@pytest.mark.parametrize("budget", [BUDGET, "1GiB"])
def test_models_that_share_memory_give_what_they_give_alone(files, budget):
    reference, small = make(), make(config=SMALL)
    target, draft = load_both(files, budget)
    loaded = swapper.loaded(target)
    assert swapper.loaded(draft) is loaded
    assert loaded.counters.pool_bytes < 8 << 20 or budget == "1GiB"
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(target(TOKENS), reference(TOKENS))
            assert torch.equal(draft(TOKENS), small(TOKENS))
        for _ in range(3):
            assert torch.equal(draft(TOKENS), small(TOKENS))
        assert torch.equal(target(TOKENS), reference(TOKENS))
        assert all(torch.equal(a, small(b)) for a, b in zip(loaded.map(draft, [TOKENS] * 3), [TOKENS] * 3, strict=True))
    with pytest.raises(swapper.StateError, match="cannot be moved"):
        draft.half()
    loaded.unload()
    for model in (target, draft):
        assert all(p.is_meta for p in model.parameters())
        with pytest.raises(swapper.StateError, match="not loaded"):
            swapper.loaded(model)


def test_models_that_take_turns_read_what_does_not_fit_and_no_more(files):
    target, draft = load_both(files)
    loaded = swapper.loaded(draft)
    with torch.no_grad():
        for _ in range(2):
            target(TOKENS), draft(TOKENS)
        loaded._streaming.engine.drain()
        before, passes = loaded.counters.bytes_read, 5
        for _ in range(passes):
            target(TOKENS), draft(TOKENS)
        read = loaded.counters.bytes_read - before
    assert 0 < loaded.read_bytes_a_pass < total_bytes(target) + total_bytes(draft) - (4 << 20)
    rows = 2 * 2 * 32 * CONFIG.width * 4
    assert read <= passes * (loaded.read_bytes_a_pass + rows) + loaded.counters.pool_bytes
    loaded.unload()


def test_models_of_transformers_share_too(tmp_path, files):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4
    )
    bert = transformers.BertModel(config).eval()
    bert.save_pretrained(tmp_path / "bert")
    with swapper.shared_memory(BUDGET):
        encoder = from_pretrained(transformers.BertModel, tmp_path / "bert")
        again = from_pretrained(transformers.BertModel, tmp_path / "bert")
        draft = swapper.load(on_meta(SMALL), files[1])
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        for _ in range(2):
            for model in (encoder, again):
                assert torch.equal(model(ids).last_hidden_state, bert(ids).last_hidden_state)
            assert torch.equal(draft(TOKENS), make(config=SMALL)(TOKENS))
    swapper.loaded(again).unload()


def test_models_that_are_forgotten_give_the_memory_back(files):
    target, draft = load_both(files)
    ghosts = [weakref.ref(target), weakref.ref(draft), weakref.ref(swapper.loaded(target))]
    del target, draft
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 3


def test_what_cannot_share_is_refused(files):
    with pytest.raises(swapper.ConfigError, match="for all models"):
        with swapper.shared_memory(BUDGET):
            swapper.load(on_meta(), files[0], host_memory="1GiB")
    with pytest.raises(swapper.StateError, match="inside of another"):
        with swapper.shared_memory(BUDGET), swapper.shared_memory(BUDGET):
            pass
    model = on_meta()
    with pytest.raises(swapper.StateError, match="belongs to another model"):
        with swapper.shared_memory(BUDGET):
            swapper.load(model, files[0])
            swapper.load(model, files[0])
    with pytest.raises(swapper.BudgetError, match="at least"):
        load_both(files, "50KiB")
    with swapper.shared_memory(BUDGET):
        pass
    swapper.loaded(swapper.load(model, files[0], host_memory=BUDGET)).unload()  # nothing of it is left


def test_the_next_pass_is_the_one_that_came_next_before():
    alone = PassPredictor([""])
    assert alone.note("", [1, 2, 3]) == [1, 2, 3]
    assert alone.note("layers.1", [2]) is None
    assert alone.note("layers.1", [2]) == [2]
    two = PassPredictor(["a", "b"])
    assert two.note("a", [1, 2]) == [1, 2]
    assert two.note("b", [3]) == [3]
    assert two.note("a", [1, 2]) == [3, 1, 2]
    assert two.note("b", [3]) == [1, 2, 3]
    assert two.note("b", [3]) == [3]


def test_parts_that_run_one_after_another_are_expected_to_do_so_again():
    """As libraries do that call a model's forward themselves: passes are of the model's children then."""
    parts = PassPredictor([""])
    assert [parts.note(name, order) for name, order in (("table", []), ("layers", [1, 2]), ("head", [3]))] == [None] * 3
    assert [parts.note(name, order) for name, order in (("table", []), ("layers", [1, 2]))] == [None] * 2
    assert parts.note("head", [3]) == [1, 2, 3]
    assert parts.note("layers", [1, 2]) == [3, 1, 2]
    assert parts.note("", [1, 2, 3]) == [1, 2, 3]
    assert parts.note("head", [3]) is None
    assert parts.note("", [1, 2, 3]) == [1, 2, 3]
