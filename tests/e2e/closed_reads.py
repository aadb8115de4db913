"""Reads what code has kept of a model after `manager.close()` or `unload`: bytes of plain torch, or an error.

Usage: closed_reads.py DIRECTORY KIND, one of KINDS. In a process of its own: a read of memory that is gone ends the process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import torch
import torch.distributed as dist
from infer.small import BUDGET, TOKENS, make, on_meta
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapper
from e2e.given_back import arena_bytes
from e2e.models import finish_step
from e2e.twins import Twins, adamw, send_away
from swapper.tensors.torch_private import without_torch_functions

WIDTH = 256


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))


def step(model: Any, optimizer: Any) -> torch.Tensor:
    return finish_step(model(inputs()).square().mean(), optimizer)


def same(kept: list[Any], expected: list[torch.Tensor]) -> None:
    gc.collect()
    assert arena_bytes() == 0, "the run's memory is not given back"
    for number, (one, other) in enumerate(zip(kept, expected, strict=True)):
        assert torch.equal(torch.as_tensor(one).to(other.device), other), number


def parameters(directory: Path, update: str = "step", is_away: bool = True) -> None:
    """Arrays (a device has none), views and `.data` of weights that are away, or in memory, of large and small parameters."""
    pair = Twins(directory, layers(), update=update, room_bytes=0 if is_away else 64 << 20)
    pair.train(step, steps=1)
    kept: list[Any] = []
    expected: list[torch.Tensor] = []
    for number, at in enumerate((1, 5, 11)):
        for name in ("weight", "bias"):
            ours, theirs = (model[at].get_parameter(name) for model in (pair.swapped, pair.plain))
            with pair.manager.gather(ours):
                array = ours.detach() if devices.NAME else ours.detach().numpy()
                kept.append((array, ours.detach()[3:], ours.data)[number])
            expected.append((theirs.detach(), theirs.detach()[3:], theirs.detach())[number])
    pair.train(step, steps=2)  # they follow the parameters
    if is_away:
        send_away(pair.manager)
    pair.manager.close()
    same(kept, expected)
    try:
        pair.swapped[1].weight.sum()
    except swapper.ColdParameterError:
        return
    raise AssertionError("a cold parameter was read")


def shown_on_a_device(directory: Path, nbytes: int, **options: Any) -> None:
    """Tensors that a hook and a gather have kept of images, whose memory is given up between uses, or stays."""
    placed = {"device": devices.device_of_tests(), "device_memory": nbytes, **options}
    pair = Twins(directory, layers(), room_bytes=4 << 20, **placed)
    kept: list[Any] = []
    handle = pair.swapped[4].register_forward_pre_hook(lambda layer, _: kept.append(layer.weight.detach()))
    pair.train(step, steps=1)
    handle.remove()
    with pair.manager.gather(pair.swapped[8].weight):
        kept.append(pair.swapped[8].weight.data[3:])
    pair.train(step, steps=2)
    pair.manager.close()
    same(kept, [pair.plain[4].weight.detach(), pair.plain[8].weight.detach()[3:]])
    kept[0].zero_()  # it is ordinary memory
    assert not kept[0].any()


def parked(directory: Path) -> None:
    """An array that is kept over `manager.parked()` has the values of then."""
    pair = Twins(directory, layers())
    pair.train(step, steps=1)
    with pair.manager.gather(pair.swapped[4].weight):
        array = pair.swapped[4].weight.detach().numpy()
    expected = pair.plain[4].weight.detach().clone()
    with pair.manager.parked():
        assert torch.equal(torch.as_tensor(array), expected)
    pair.train(step, steps=1)
    pair.manager.close()
    same([array], [expected])


def written(directory: Path) -> None:
    """What was written through an array while its page was away."""
    pair = Twins(directory, layers())
    weight = pair.swapped[4].weight
    with pair.manager.gather(weight):
        array = weight.detach().numpy()
    send_away(pair.manager)
    array[7, 5] = 3
    with torch.no_grad():
        pair.plain[4].weight[7, 5] = 3
    pair.manager.close()
    same([array], [pair.plain[4].weight.detach()])
    array[9] = 1  # it is ordinary memory
    assert array[9].sum() == WIDTH


def graph(directory: Path) -> None:
    """An output with its graph, which has views of weights and weights themselves."""
    pair = Twins(directory, nn.Sequential(*layers(), nn.LayerNorm(WIDTH)))
    output = pair.swapped(inputs().requires_grad_())
    assert torch.equal(output, pair.plain(inputs()))
    send_away(pair.manager)
    pair.manager.close()
    try:
        output.sum().backward()
    except (swapper.SwapperError, RuntimeError):
        return
    pair.plain(inputs()).sum().backward()
    assert all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in both_parameters(pair))


def both_parameters(pair: Twins) -> Any:
    return zip(pair.swapped.parameters(), pair.plain.parameters(), strict=True)


def gradients(directory: Path, where: str = "nvme") -> None:
    pair = Twins(directory, layers(), gradients=where)
    for model in (pair.swapped, pair.plain):
        model(inputs()).square().mean().backward()
    kept = [layer.weight.grad for layer in pair.swapped]
    with without_torch_functions():
        arrays = [gradient.numpy() for gradient in kept]
    expected = [layer.weight.grad for layer in pair.plain]
    pair.manager.close()
    same(arrays, expected)


def state(directory: Path) -> None:
    """Arrays and tensors of `optimizer.state`, and of a state_dict, which holds or has expired."""
    pair = Twins(directory, layers())
    pair.train(step, steps=1)
    ours, theirs = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    expired = [pair.swapped.state_dict()["4.weight"], ours[0]["exp_avg"]]
    pair.train(step, steps=1)
    ours, theirs = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    weight, twin = pair.swapped[2].weight, pair.plain[2].weight
    kept = [ours[0]["exp_avg"].numpy(), ours[1]["exp_avg_sq"], pair.optimizer.state[weight]["exp_avg"].numpy()]
    expected = [theirs[0]["exp_avg"], theirs[1]["exp_avg_sq"], pair.plain_optimizer.state[twin]["exp_avg"]]
    pair.manager.close()
    same(kept, expected)
    for tensor in expired:
        try:
            tensor.sum()
        except swapper.StateError:
            continue
        raise AssertionError("an expired tensor was read")


def shards(directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    plain, model = layers(), layers()
    for layer in (*model, model):
        fully_shard(layer)
    with swapper.SwapManager(directory, host_memory="8MiB") as manager:
        _, optimizer = manager.offload(model, adamw(model.parameters()), params="nvme", optimizer_state="nvme")
        twin = adamw(plain.parameters())
        for number in range(2):
            step(model, optimizer)
            step(plain, twin)
            if number == 0:
                kept = [model[3].weight.to_local(), model[7].weight.to_local().detach().numpy()]
        send_away(manager)
    same(kept, [plain[3].weight.detach(), plain[7].weight.detach()])
    dist.destroy_process_group()


def weights(directory: Path, budget: str = BUDGET) -> None:
    torch.save(make().state_dict(), directory / "model.pt")
    kept_by_hooks(make(), swapper.load(on_meta(), directory / "model.pt", host_memory=budget), TOKENS)


def weights_on_a_device(directory: Path) -> None:
    """What a hook has kept of an image whose memory is given up after its use, and of one that stays; others are given back."""
    plain, empty = layers(), layers().to("meta")
    torch.save(plain.state_dict(), directory / "model.pt")
    device = devices.device_of_tests()
    model = swapper.load(empty, directory / "model.pt", host_memory="8MiB", device=device, device_memory=1 << 20)
    kept: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda layer, _, n=number: kept.update({n: layer.weight.detach()}))
    with torch.no_grad():
        model(inputs())
    for number in {*kept} - {0, 4}:
        del kept[number]
    swapper.loaded(model).unload()
    same([kept[0], kept[4]], [plain[0].weight.detach(), plain[4].weight.detach()])
    if not devices.IS_REAL:
        assert device.used_bytes <= 4 * kept[0].nbytes, "others are given back"


def end_of_file(directory: Path) -> None:
    """The last bytes of a checkpoint are those of a weight, and no whole sector."""
    plain = nn.Sequential(*(nn.Linear(401, 401, bias=False) for _ in range(16)))
    save_file(plain.state_dict(), directory / "model.safetensors")
    with torch.device("meta"):
        empty = nn.Sequential(*(nn.Linear(401, 401, bias=False) for _ in range(16)))
    kept_by_hooks(plain, swapper.load(empty, directory / "model.safetensors", host_memory="4MiB"), torch.ones(2, 401))


def kept_by_hooks(plain: nn.Module, model: nn.Module, inputs: torch.Tensor) -> None:
    """What a hook keeps of a loaded model's weights, as arrays: they are read while the model is there, and after it."""
    kept = {}

    def keep(module: nn.Module, _: Any) -> None:
        kept.update({id(module): [p.detach().numpy() for p in module.parameters(recurse=False)]})

    handles = [module.register_forward_pre_hook(keep) for module in model.modules()]
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(inputs), plain(inputs))
    for handle in handles:
        handle.remove()
    pairs = [(a, b) for a, b in zip(model.modules(), plain.modules(), strict=True) if id(a) in kept]
    found = [
        (array, p) for ours, theirs in pairs for array, p in zip(kept[id(ours)], theirs.parameters(False), strict=True)
    ]
    assert len(found) == len(list(plain.parameters()))
    assert all(torch.equal(torch.as_tensor(array), p) for array, p in found)
    swapper.loaded(model).unload()
    same([array for array, _ in found], [p.detach() for _, p in found])


def keys(directory: Path) -> None:
    """Keys and values of two layers, one of which has pages on the drive."""
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=300, **sizes)).eval()
    ids, plain = torch.arange(600).view(2, 300) % 300, DynamicCache(config=model.config)
    with torch.no_grad(), swapper.KVCache(model, host_memory="2MiB", directory=directory) as cache:
        for some in ids.split(150, dim=1):
            model(some, past_key_values=cache)
            model(some, past_key_values=plain)
        kept = [cache.layers[0].keys.numpy(), cache.layers[5].values]
    same(kept, [plain.layers[0].keys, plain.layers[5].values])


def forgotten_keys(directory: Path) -> None:
    """Keys and values of a cache that was reset and is used again; those of a window, which may have moved on, can be read."""
    from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    ids = torch.arange(600).view(2, 300) % 300
    for window in (None, 64):
        config = MistralConfig(vocab_size=300, num_hidden_layers=8, sliding_window=window, **sizes)
        model = AutoModelForCausalLM.from_config(config).eval()
        kept: list[Any] = []
        expected: list[torch.Tensor] = []
        with torch.no_grad(), swapper.KVCache(model, host_memory="2MiB", directory=directory) as cache:
            for some in (ids, ids.flip(1)):
                plain = DynamicCache(config=config)
                for part in (some[:, :100], *some[:, 100:].split(8, dim=1)):
                    model(part, cache=cache)
                    model(part, cache=plain)
                    kept.append(cache.layers[5].values[:, 1:])
                    expected.append(plain.layers[5].values[:, 1:].clone())
                cache.reset()
            seen = [one.clone() for one in kept]
        same(kept, seen if window else expected)


def activations(directory: Path) -> None:
    """An array of an activation that was on the drive, and came back."""
    pair = Twins(directory, layers())
    kept: list[Any] = []
    value = inputs().clone().requires_grad_()
    with swapper.offload_activations(pair.manager, to="nvme", host_memory="1MiB", min_bytes=1):
        loss = value.square().sin().sum()
    found = loss.grad_fn.next_functions[0][0]._saved_self
    kept.append(found.detach().numpy())
    del loss
    pair.manager.close()
    same(kept, [inputs().square()])


KINDS: dict[str, Callable[[Path], None]] = {
    "parameters that are away": parameters,
    "parameters in frames": lambda directory: parameters(directory, is_away=False),
    "parameters of deferred steps": lambda directory: parameters(directory, "deferred"),
    "parameters updated in backward": lambda directory: parameters(directory, "backward"),
    "what a device showed": lambda directory: shown_on_a_device(directory, 2 << 20),
    "what a device showed and has": lambda directory: shown_on_a_device(directory, 64 << 20),
    "what a device showed of host memory": lambda directory: shown_on_a_device(directory, 2 << 20, params="host"),
    "parameters of a parked run": parked,
    "written parameters": written,
    "a graph": graph,
    "gradients on the drive": gradients,
    "gradients in memory": lambda directory: gradients(directory, "host"),
    "state": state,
    "shards": shards,
    "streamed weights": weights,
    "what a device showed of streamed weights": weights_on_a_device,
    "the end of a file": end_of_file,
    "weights in memory": lambda directory: weights(directory, "1GiB"),
    "keys and values": keys,
    "keys and values of the past": forgotten_keys,
    "activations": activations,
}


OF_ARRAYS = ("parameters of a parked run", "written parameters", "gradients on the drive", "gradients in memory")
"""Kinds of which there are none on a device."""


def main(directory: str, kind: str) -> None:
    torch.set_num_threads(1)
    KINDS[kind](Path(directory))
    print(f"{kind}: same")


if __name__ == "__main__":
    main(*sys.argv[1:])
