"""A model runs from quantised weights, and gives what a model in memory with the same values gives, bit for bit."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import save_file

import swapper
from infer.small import TOKENS, make, on_meta, run
from swapper.checkpoint.exporting import export
from swapper.infer.weights import MadeMemory
from swapper.integrations.transformers import from_pretrained
from swapper.paging.pager import Pager


@pytest.fixture(params=["int8", "int4"])
def scheme(request):
    return request.param


@pytest.mark.parametrize("budget", ["1MiB", "3MiB", "5MiB", "1GiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_dequantised_values(tmp_path, scheme, dtype, budget):
    reference = make(dtype)
    save_file(reference.state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)
    try:
        model = swapper.load(on_meta(dtype=dtype), tmp_path / "quantised", host_memory=budget)
    except swapper.BudgetError as refusal:
        assert budget == "1MiB"
        least = int(str(refusal).split("(")[1].split(" bytes")[0])
        model = swapper.load(on_meta(dtype=dtype), tmp_path / "quantised", host_memory=least)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(tensor.dtype == dtype for tensor in state.values())
    loaded = swapper.loaded(model)
    assert loaded.read_bytes_a_pass < (0.55 if scheme == "int8" else 0.35) * (tmp_path / "model").stat().st_size
    reference.load_state_dict(state)
    with torch.no_grad():
        expected = reference(TOKENS)
        for _ in range(3):
            assert torch.equal(model(TOKENS), expected)
    loaded.unload()


def test_another_dtype_is_dequantised_to_at_once(tmp_path, scheme):
    reference = make()
    save_file(reference.state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)
    model = swapper.load(on_meta(), tmp_path / "quantised", host_memory="3MiB", dtype=torch.bfloat16)
    reference.to(torch.bfloat16).load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), reference(TOKENS))
    swapper.loaded(model).unload()


def test_a_computed_weight_whose_pages_stay_asks_the_pager_for_nothing(tmp_path, scheme, monkeypatch):
    """Each lease of no pages would be a departure from the schedule, for which all pages' next uses are looked for."""
    save_file(make().state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)
    model, asked = swapper.load(on_meta(), tmp_path / "quantised", host_memory="1GiB"), []
    lease = Pager.lease
    monkeypatch.setattr(Pager, "lease", lambda pager, access: (asked.append(access), lease(pager, access)))
    with torch.no_grad():
        expected = model(TOKENS)
        assert asked  # to keep them
        asked.clear()
        assert torch.equal(model(TOKENS), expected)
    assert not asked
    swapper.loaded(model).unload()


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_models_of_transformers_run_from_quantised_weights(tmp_path, scheme, kind):
    common = {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "Llama":
        cls, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**common)
    else:
        cls, config = transformers.MixtralForCausalLM, transformers.MixtralConfig(**common, num_local_experts=4)
    cls(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "huggingface", quantize=scheme)
    config.save_pretrained(tmp_path / "quantised")
    model = from_pretrained(cls, tmp_path / "quantised", host_memory="5MiB" if kind == "Llama" else "9MiB")
    assert model.dtype == torch.bfloat16
    eager = {"experts_implementation": "eager"} if kind == "Mixtral" else {}
    reference = cls.from_pretrained(tmp_path / "model", dtype=torch.bfloat16, **eager)
    reference.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    ids = torch.arange(24).view(2, 12) * 31 % 1022 + 2
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids).logits, reference(ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    swapper.loaded(model).unload()


class Keeping(torch.nn.Linear):
    """Notes where its weight is, and keeps the weight if told so."""

    def __init__(self) -> None:
        super().__init__(512, 512)
        self.places: list[int] = []
        self.kept: list[torch.Tensor] = []
        self.keeps = False

    def forward(self, x):
        self.places.append(self.weight.data_ptr())
        self.kept += [self.weight.detach()] if self.keeps else []
        return super().forward(x)


@pytest.mark.whole
def test_computed_weights_take_one_memory_in_turn_and_those_that_are_held_keep_theirs(tmp_path, scheme):
    model = torch.nn.Sequential(*(Keeping() for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)
    swapped = swapper.load(model.to("meta"), tmp_path / "quantised", host_memory="4MiB")
    x = torch.randn(2, 512)
    with torch.no_grad():
        expected = swapped(x)
        assert torch.equal(swapped(x), expected)
        assert len({place for layer in swapped for place in layer.places}) == 1
        swapped[1].keeps = True
        for _ in range(3):
            assert torch.equal(swapped(x), expected)
        state = {name: tensor.clone() for name, tensor in swapped.state_dict().items()}
    assert len(swapped[1].kept) == 3 and all(torch.equal(kept, state["1.weight"]) for kept in swapped[1].kept)
    swapper.loaded(swapped).unload()
    assert all(torch.equal(kept, state["1.weight"]) for kept in swapped[1].kept)


def test_memory_is_used_again_once_nobody_holds_it():
    memory = MadeMemory(1 << 20)

    def take(nbytes: int) -> torch.Tensor:
        return memory.empty((nbytes,), dtype=torch.uint8)

    first, second = take(1000).fill_(1), take(1 << 19).fill_(2)
    begin = first.data_ptr()
    assert second.data_ptr() == begin + 1024
    view = first[:10]
    del first
    assert take(100).data_ptr() > second.data_ptr(), "a view holds it"
    del view
    third = take(1000).fill_(3)
    assert third.data_ptr() == begin and second.unique().tolist() == [2]
    assert memory.empty((0, 4), dtype=torch.float32).shape == (0, 4)
    large = take(64 << 20)  # more than it has
    assert large.nbytes == 64 << 20 and not begin <= large.data_ptr() < begin + (1 << 20)


def test_two_threads_are_never_given_the_same_memory():
    memory, found = MadeMemory(1 << 20), []

    def work(number: int) -> None:
        for _ in range(1000):
            mine = [memory.empty((256,), dtype=torch.int64).fill_(number) for _ in range(4)]
            found.append(all(bool((one == number).all()) for one in mine))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(partial(work, 1), partial(work, 2))
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * 2000


def test_threads_that_pass_at_once_compute_the_same(tmp_path, scheme):
    save_file(make().state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)
    model = swapper.load(on_meta(), tmp_path / "quantised", host_memory="3MiB")
    expected, found = run(model), []
    in_threads(*[lambda: found.extend(torch.equal(run(model), expected) for _ in range(4))] * 2)
    assert found == [True] * 8
    swapper.loaded(model).unload()


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
