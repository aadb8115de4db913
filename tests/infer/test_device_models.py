"""Models of every kind whose kernels run on a device of late copies: quantised, mixtures, tied, cut by rows, generating."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file

import swapper
from infer import test_experts as mixture
from infer import test_row_partitioned as wide
from infer.host_device import HostDevice
from infer.small import TOKENS, make, on_meta
from infer.test_transformers_inference import ARCHITECTURES, GENERATING, folders, tensors
from swapper.checkpoint.exporting import export
from swapper.integrations.transformers import from_pretrained

__all__ = ["folders"]  # a fixture


def with_least_memory(load, order="late", share=0):
    """Load with the least device memory that is said to be enough, and `share` more, and then the least host memory.

    Returns model, device and device memory.
    """
    device = HostDevice(order)
    budgets = {"device_memory": 1, "host_memory": 1}
    for _ in range(2):
        try:
            load(device=device, **budgets)
        except swapper.BudgetError as refusal:
            option = "device_memory" if "device_memory" in str(refusal) else "host_memory"
            budgets[option] = int(str(refusal).split("(")[1].split(" bytes")[0])
            budgets["device_memory"] += share if option == "device_memory" else 0
    return load(device=device, **budgets), device, budgets["device_memory"]


def smaller(device, nbytes):
    """The device, without room for a tensor of `nbytes`."""
    device.module.capacity_bytes = nbytes - 1
    return device


def unload(model):
    swapper.loaded(model)._on_device.tier.finish()
    swapper.loaded(model)._streaming.pager.check()
    swapper.loaded(model).unload()


@pytest.mark.parametrize("share", [0, 2 << 20])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_are_those_in_memory(folders, name, share):
    class_name, _, inputs = ARCHITECTURES[name]
    cls, folder = getattr(transformers, class_name), folders(name)
    reference = cls.from_pretrained(folder, **({"experts_implementation": "eager"} if name == "Mixtral" else {}))
    model, device, budget = with_least_memory(lambda **options: from_pretrained(cls, folder, **options), share=share)
    with torch.no_grad():
        expected = tensors(reference(**inputs()))
        for _ in range(3):
            found = tensors(model(**inputs()))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert device.peak_bytes <= budget
    unload(model)


@pytest.mark.parametrize("name", GENERATING)
def test_what_is_generated_is_what_is_generated_in_memory(folders, name):
    class_name, _, inputs = ARCHITECTURES[name]
    cls, folder = getattr(transformers, class_name), folders(name)
    batch = {key: value for key, value in inputs().items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    expected = cls.from_pretrained(folder).generate(**batch, **options)
    model, _, _ = with_least_memory(lambda **budgets: from_pretrained(cls, folder, **budgets), "by chance 3", 1 << 20)
    assert torch.equal(model.generate(**batch, **options), expected)
    unload(model)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("share", [0, 1 << 20, 1 << 28])
def test_quantised_weights_are_dequantised_on_the_device(tmp_path, scheme, share):
    reference = make(torch.bfloat16)
    save_file(reference.state_dict(), tmp_path / "model")
    export(tmp_path / "model", tmp_path / "quantised", "safetensors", quantize=scheme)

    def load(**options):
        return swapper.load(on_meta(dtype=torch.bfloat16), tmp_path / "quantised", **options)

    model, _, _ = with_least_memory(load, share=share)
    reference.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), reference(TOKENS))
    loaded = swapper.loaded(model)
    assert loaded.counters.uploaded_bytes < 3 * 0.6 * (tmp_path / "model").stat().st_size
    unload(model)


def test_single_experts_are_brought_to_the_device(tmp_path):
    reference, path = mixture.saved(tmp_path)
    model, _, _ = with_least_memory(lambda **options: swapper.load(mixture.empty(), path, **options))
    with torch.no_grad():
        for number in range(mixture.EXPERTS):
            batch = mixture.rows(number, (number + 3) % mixture.EXPERTS)
            assert torch.equal(model(*batch), reference(*batch))
    unload(model)


def test_a_matrix_that_is_larger_than_the_device_is_multiplied_by_parts(tmp_path):
    arguments = (8192, True, torch.bfloat16)
    reference = wide.make(*arguments)
    wide.save(reference, tmp_path / "model")
    model, device, budget = with_least_memory(
        lambda device, **options: swapper.load(
            wide.empty(*arguments), tmp_path / "model", device=smaller(device, reference.head.weight.nbytes), **options
        )
    )
    assert budget < reference.head.weight.nbytes
    with torch.no_grad():
        for ids in wide.inputs_of(8192):
            assert torch.equal(model(ids), reference(ids))
        assert torch.equal(model.head.weight.sum(), reference.head.weight.sum())
        model.inner.register_forward_pre_hook(lambda *_: model.embedding.weight.sum())
        model.register_forward_pre_hook(lambda *_: None)
        with pytest.raises(swapper.BudgetError, match=r"embedding\.weight is used as a whole"):
            model(ids)
    assert device.peak_bytes <= budget
    unload(model)
