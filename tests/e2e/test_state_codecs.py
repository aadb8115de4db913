"""`state_codec=`: the optimizer's state is stored encoded. "split" is bit-equal to plain torch; what rounds is bit-equal to itself,
whatever the budget, placement, update time and number of threads, over a close and over snapshots, and near plain torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapper
from e2e import fsdp_codecs
from e2e.coded_runs import PLACES, Run, bf16_net, run_of
from e2e.models import Net, train_step
from e2e.optimizers import OPTIMIZERS
from e2e.processes import run_python
from e2e.several import Several
from e2e.twins import Twins, adamw, assert_same
from swapper.durability.verify import verify

LOSSY = ("bf16", "8bit")


@pytest.mark.parametrize(
    "update, optimizer",
    [("step", "adamw fused amsgrad"), ("deferred", "sgd"), ("backward", "nadam"), ("step", "adafactor")],
)
def test_split_masters_are_bit_equal_to_plain_torch(tmp_path: Path, update: str, optimizer: str) -> None:
    pair = Twins(tmp_path / "run", bf16_net(), OPTIMIZERS[optimizer], master=True, state_codec="split", update=update)
    pair.train(train_step, steps=3)
    owner = pair.manager.current.run.model.optimizer_state
    for (name, parameter), master in zip(pair.plain.named_parameters(), pair.plain_optimizer.masters, strict=True):
        assert owner._coded.has(name, "master") == (parameter.dim() > 1)
        pair.manager.current.run.model.finish_update()
        if parameter.dim() > 1:
            assert torch.equal(owner._coded.read(name, "master"), master)
    pair.finish(paged=optimizer != "adafactor")


@pytest.mark.parametrize("codec", [*LOSSY, {"exp_avg": "bf16", "exp_avg_sq": "variance8"}], ids=str)
@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_results_do_not_depend_on_placement_budget_or_update_time(tmp_path: Path, codec: Any, place: str) -> None:
    expected = run_of(tmp_path / "one", codec)
    losses, content = run_of(tmp_path / "other", codec, **PLACES[place])
    assert losses == expected[0]
    assert_same(content, expected[1])


@pytest.mark.parametrize(
    "drives, threads, place", [(2, 3, "all on the drive"), (3, 1, "deferred"), (3, 2, "in backward")]
)
@pytest.mark.parametrize("codec", ["split", *LOSSY])
def test_results_do_not_depend_on_drives_and_threads(
    tmp_path: Path, second_drive: Path, codec: str, drives: int, threads: int, place: str
) -> None:
    """The state lies over all of them, a snapshot is of one file, and the run goes on from them."""
    losses, content = run_of(tmp_path / "one", codec, steps=4)
    others = [second_drive, tmp_path / "third"][: drives - 1]
    for path in (tmp_path / "first", *others):
        path.mkdir(exist_ok=True)
    before = torch.get_num_threads()

    def run(steps: int) -> Run:
        run = Run(tmp_path / "first", codec, others=others, host_memory="12MiB", **PLACES[place])
        run.optimizer.register_step_pre_hook(lambda *_: torch.set_num_threads(threads))
        run.optimizer.register_step_post_hook(lambda *_: torch.set_num_threads(before))
        seen.extend(run.train(steps))
        return run

    seen: list[float] = []
    first = run(2)
    coded = [s for s in first.manager.current.run.sections if any(":" in slot.spec.kind for slot in s.plan.slots)]
    assert {page.drive for section in coded for page in section.pages} == set(range(drives))
    random_state = torch.get_rng_state()
    first.close()
    torch.set_rng_state(random_state)
    second = run(0)
    torch.set_rng_state(random_state)
    seen.extend(second.train(2))
    assert seen == losses
    assert_same(second.content(), content)
    second.manager.snapshot(tmp_path / "snapshot.pt").wait()
    second.close()
    loaded = swapper.checkpoint.load(tmp_path / "snapshot.pt")
    assert_same(loaded["optimizer"]["state"], content["state"])
    assert_same({key: loaded["master"][key] for key in content["masters"]}, content["masters"])


@pytest.mark.parametrize("optimizer", ["sgd", "nadam", "adamw amsgrad"])
def test_other_optimizers_run_between_the_codecs(tmp_path: Path, optimizer: str) -> None:
    """torch.optim.AdamW is updated in one pass, and others by their own code."""
    make = OPTIMIZERS[optimizer]
    losses, content = run_of(tmp_path / "one", "8bit", make_optimizer=make)
    others = run_of(tmp_path / "other", "8bit", make_optimizer=make, **PLACES["all in memory"])
    assert losses == others[0]
    assert_same(others[1], content)
    assert losses == pytest.approx(run_of(tmp_path / "exact", "exact", make_optimizer=make)[0], rel=2e-3)


class OwnAdamW(torch.optim.AdamW):
    """Is not updated in one pass, as it may do anything."""


@pytest.mark.parametrize("codec", LOSSY)
def test_one_pass_is_near_the_codecs_around_the_optimizer(tmp_path: Path, codec: str) -> None:
    fused, around = (
        run_of(tmp_path / name, codec, make_optimizer=partial(make, lr=1e-3), steps=2)
        for name, make in (("fused", torch.optim.AdamW), ("around", OwnAdamW))
    )
    assert fused[0] == pytest.approx(around[0], rel=1e-4)
    for name, master in fused[1]["masters"].items():
        torch.testing.assert_close(master, around[1]["masters"][name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("make", [torch.optim.AdamW, OwnAdamW])
def test_updates_do_not_depend_on_the_number_of_threads(tmp_path: Path, make: Any) -> None:
    before, contents = torch.get_num_threads(), []
    for threads in (1, 3):
        run = Run(tmp_path / str(threads), "8bit", partial(make, lr=1e-3))
        run.optimizer.register_step_pre_hook(lambda *_, n=threads: torch.set_num_threads(n))
        run.optimizer.register_step_post_hook(lambda *_: torch.set_num_threads(before))
        contents.append((run.train(3), run.content()))
        run.close()
    assert contents[0][0] == contents[1][0]
    assert_same(contents[1][1], contents[0][1])


@pytest.mark.parametrize("codec", ["split", *LOSSY])
def test_a_run_that_is_closed_continues_bit_for_bit(tmp_path: Path, codec: str) -> None:
    losses, content = run_of(tmp_path / "whole", codec, steps=4)
    one = Run(tmp_path / "parts", codec)
    first = one.train(2)
    random_state = torch.get_rng_state()
    one.close()
    other = Run(tmp_path / "parts", codec, host_memory="64MiB")
    torch.set_rng_state(random_state)
    assert other.manager.step == 2
    assert first + other.train(2) == losses
    assert_same(other.content(), content)
    other.close()


@pytest.mark.parametrize("codec", LOSSY)
def test_rounded_state_trains_as_exact_state_does(tmp_path: Path, codec: str) -> None:
    exact, _ = run_of(tmp_path / "exact", "exact", steps=8)
    coded, _ = run_of(tmp_path / "coded", codec, steps=8)
    assert coded != exact
    assert coded[-1] < 0.97 * coded[0]
    assert coded == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("codec", ["split", *LOSSY])
def test_state_dict_shows_fp32_and_is_taken_back(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path / "run", codec)
    run.train(2)
    before = run.content()
    plain = adamw(bf16_net().parameters())
    plain.load_state_dict(run.optimizer.state_dict())
    assert all(v.dtype == torch.float32 for state in before["state"].values() for v in state.values())
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(saved)
    assert_same(run.content(), before)  # what was decoded encodes to the same
    weight = run.model.blocks[0].up.weight
    moment = run.optimizer.state[weight]["exp_avg"]
    assert torch.equal(moment, before["state"][number_of(run, weight)]["exp_avg"])
    moment.zero_()
    assert not run.optimizer.state[weight]["exp_avg"].any()
    run.optimizer.state[weight]["exp_avg"] = torch.ones(weight.shape)
    assert torch.equal(run.optimizer.state[weight]["exp_avg"], torch.ones(weight.shape))
    run.close()


def number_of(run: Run, parameter: nn.Parameter) -> int:
    return [id(p) for p in run.model.parameters()].index(id(parameter))


@pytest.mark.parametrize("place", ["all on the drive", "on a device, also the state"])
@pytest.mark.parametrize("codec", ["split", *LOSSY])
def test_a_snapshot_has_codes_and_swapper_reads_fp32(tmp_path: Path, codec: str, place: str) -> None:
    run = Run(tmp_path / "run", codec, **PLACES[place])
    run.train(2)
    path = tmp_path / "snapshot.pt"
    run.manager.snapshot(path).wait()
    content = run.content()
    run.close()
    name = "blocks.0.up.weight"
    raw = torch.load(path)
    assert raw["master"][name]["codec"] == raw["swapper"]["state_codec"]["master"]
    assert sum(t.nbytes for k, t in raw["master"][name].items() if k != "codec") < 3 * content["masters"][name].numel()
    assert "master: " in swapper.checkpoint.inspect(path)["metadata"]["state_codec"]
    swapper.checkpoint.export(path, tmp_path / "plain.pt", "torch", what="all")
    mapped = swapper.checkpoint.load(path, mmap=True)
    for loaded in (swapper.checkpoint.load(path), mapped, torch.load(tmp_path / "plain.pt")):
        assert_same(loaded["optimizer"]["state"], content["state"])
        assert_same({key: loaded["master"][key] for key in content["masters"]}, content["masters"])
        assert "state_codec" not in loaded["swapper"]
    with pytest.raises(swapper.CheckpointError, match="--to torch"):
        swapper.checkpoint.export(path, tmp_path / "plain.safetensors", "safetensors", what="all")


def groups_of(parameters: list[nn.Parameter], number: int) -> torch.optim.Optimizer:
    """Two groups, one of each kind of parameter, if there are both."""
    kinds = [[p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": kind, "lr": 10.0 ** -(3 + n)} for n, kind in enumerate(kinds) if kind]
    return torch.optim.AdamW(groups) if number % 2 == 0 else torch.optim.NAdam(groups)


@pytest.mark.parametrize("kind", ["frozen", "extended"])
@pytest.mark.parametrize("codec", ["split", *LOSSY, {"exp_avg": "bf16", "exp_avg_sq": "variance8"}], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_a_snapshot_of_several_optimizers_is_decoded(tmp_path: Path, count: int, codec: Any, kind: str) -> None:
    """Each one's state, with frozen parameters, groups, and a group that was added later; a run resumes with it."""

    def run(resumed: bool) -> tuple[Any, Any, list[Any]]:
        model = bf16_net()
        trained = [p for block in model.blocks[:3] for p in block.parameters()]
        late = list(model.blocks[3].parameters())
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is one for one in trained))
        optimizers = [groups_of(trained[n::count], n) for n in range(count)]
        if resumed and kind == "extended":
            model.blocks[3].requires_grad_(True)
            optimizers[-1].add_param_group({"params": late})
        manager = swapper.SwapManager(tmp_path / "run", host_memory="64MiB", resume="auto")
        given = optimizers if count > 1 else optimizers[0]
        _, paged = manager.offload(
            model, given, params="nvme", optimizer_state="nvme", master_weights=torch.float32, state_codec=codec
        )
        several = Several(paged if count > 1 else [paged])
        if not resumed:
            torch.manual_seed(0)
            train_step(model, several)
            if kind == "extended":
                model.blocks[3].requires_grad_(True)
                several[-1].add_param_group({"params": late})
            train_step(model, several)
        return manager, model, copy.deepcopy(several.state_dict())

    manager, model, states = run(resumed=False)
    path, plain = tmp_path / "snapshot.pt", tmp_path / "plain.pt"
    manager.snapshot(path).wait()
    owner = manager.current.run.model.optimizer_state
    coded = [name for name, _ in model.named_parameters() if owner._coded.has(name, "master")]
    masters = {name: owner._coded.read(name, "master") for name in coded}
    manager.close()
    assert not any(report.faults for report in verify(path))
    assert "state_codec" in swapper.checkpoint.inspect(path)["metadata"]
    swapper.checkpoint.export(path, plain, "torch", what="all")
    swapper.checkpoint.export(path, tmp_path / "model.safetensors", "safetensors")
    mapped = swapper.checkpoint.load(path, mmap=True)
    for loaded in (swapper.checkpoint.load(path), mapped, torch.load(plain)):
        saved = loaded["optimizer"] if count > 1 else [loaded["optimizer"]]
        assert [one["state"].keys() for one in saved] == [one["state"].keys() for one in states]
        for one, state in zip(saved, states, strict=True):
            assert_same(one["state"], state["state"])
        assert_same({name: loaded["master"][name] for name in masters}, masters)
    manager, _, resumed = run(resumed=True)
    manager.close()
    for one, state in zip(resumed, states, strict=True):
        assert_same(one["state"], state["state"])


def test_several_models_have_their_masters_by_name(tmp_path: Path) -> None:
    models = {"one": bf16_net(), "other": bf16_net()}
    optimizer = adamw([p for model in models.values() for p in model.parameters()])
    path = tmp_path / "snapshot.pt"
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        _, paged = manager.offload(models, optimizer, master_weights=torch.float32, state_codec="split")
        (models["one"](torch.ones(2, 8, dtype=torch.long)).sum() + 0 * models["other"].norm.weight.sum()).backward()
        paged.step()
        owner = manager.current.run.model.optimizer_state
        masters = {
            name: owner._coded.read(name, "master") for name in ("one.blocks.0.up.weight", "other.blocks.0.up.weight")
        }
        manager.snapshot(path).wait()
    loaded = swapper.checkpoint.load(path)["master"]
    assert_same({name: loaded[name] for name in masters}, masters)
    assert not torch.equal(*masters.values())


@pytest.mark.parametrize(
    "place",
    ["all on the drive", "parameters in memory", "on a device", "updated on a device", "on a device, also the state"],
)
@pytest.mark.parametrize("codec", ["split", "8bit"])
def test_masters_follow_parameters_that_are_changed_between_steps(tmp_path: Path, codec: str, place: str) -> None:
    """As exact ones do: an element that is changed begins at its new value, and the others keep their masters."""
    contents = []
    for n, chosen in enumerate(("exact", codec)):
        run = Run(tmp_path / str(n), chosen, host_memory="12MiB", **PLACES[place])
        run.train(1)
        weight, other = run.model.blocks[0].up.weight, run.model.blocks[1].up.weight
        before = run.content()["masters"].get("blocks.0.up.weight")
        with run.manager.gather(run.model, write=True), torch.no_grad():
            weight[3] = 0.25
            with run.manager.gather(run.model.blocks[0], write=True):
                weight[5] = 0.5
            weight[7] = 0.75
        in_memory = place == "parameters in memory"  # where it is announced by gather alone
        with torch.no_grad(), run.manager.gather(other, write=True) if in_memory else nullcontext():
            other[1].mul_(2)
        run.model.load_state_dict({"blocks.2.up.weight": torch.ones(weight.shape)}, strict=False)
        if before is not None:
            after = run.content()["masters"]["blocks.0.up.weight"]
            changed = torch.zeros(len(weight), dtype=torch.bool)
            changed[[3, 5, 7]] = True
            assert torch.equal(after[~changed], before[~changed])
            assert torch.equal(after[changed], torch.tensor([[0.25], [0.5], [0.75]]).expand(3, weight.shape[1]))
        contents.append((run.train(1), run.content()))
        run.close()
    if codec == "split":
        assert contents[0][0] == contents[1][0]
        assert_same(contents[1][1]["state"], contents[0][1]["state"])
        assert_same(contents[1][1]["parameters"], contents[0][1]["parameters"])


@pytest.mark.parametrize("codec", ["split", "8bit"])
def test_more_is_trained_later(tmp_path: Path, codec: str) -> None:
    results = []
    for chosen in ("exact", codec):
        run = Run(tmp_path / chosen, chosen, host_memory="12MiB", select=lambda model: model.blocks[:2])
        first = run.train(2)
        kept = run.content()
        run.model.blocks[2:].requires_grad_(True)
        run.optimizer.add_param_group({"params": list(run.model.blocks[2:].parameters())})
        if chosen == codec:
            assert_same({name: run.content()["masters"][name] for name in kept["masters"]}, kept["masters"])
        results.append((first + run.train(2), run.content()["parameters"]))
        run.close()
    assert results[0][0] == (results[1][0] if codec == "split" else pytest.approx(results[1][0], rel=1e-3))
    if codec == "split":
        assert_same(results[1], results[0])


@pytest.mark.parametrize("codec", ["split", *LOSSY])
def test_state_that_the_optimizer_has_already_is_encoded(tmp_path: Path, codec: str) -> None:
    results = []
    for chosen in ("exact", codec):
        run = Run(tmp_path / chosen, chosen, host_memory="64MiB", warm_up=True)
        results.append((run.content()["state"], run.train(2)))
        run.close()
    if codec == "split":
        assert_same(results[1], results[0])
    for number, state in results[0][0].items():
        for key, value in state.items():
            torch.testing.assert_close(
                results[1][0][number][key], value, rtol=0.05, atol=0.02 * value.abs().max().item()
            )
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-3)


def test_a_model_without_values_gets_its_masters_from_init(tmp_path: Path) -> None:
    results = []
    for chosen in ("exact", "split"):
        with torch.device("meta"):
            model = Net().bfloat16()
        source = bf16_net().state_dict()
        swapper.checkpoint.save(source, tmp_path / f"{chosen}.pt")
        with swapper.SwapManager(tmp_path / chosen, host_memory="12MiB") as manager:
            _, optimizer = manager.offload(
                model,
                adamw(model.parameters()),
                params="nvme",
                optimizer_state="nvme",
                master_weights=torch.float32,
                state_codec=chosen,
                init=tmp_path / f"{chosen}.pt",
            )
            torch.manual_seed(3)
            results.append([train_step(model, optimizer).item() for _ in range(3)])
    assert results[0] == results[1]


def test_bytes_of_a_step_are_those_of_the_plan(tmp_path: Path) -> None:
    for codec in ("split", "8bit"):
        run = Run(tmp_path / codec, codec)
        run.train(2)
        before, traffic = copy.copy(run.manager.counters), run.manager.current.run.plan.traffic
        run.train(4)
        after = run.manager.counters
        for measured, planned in (
            (after.bytes_read - before.bytes_read, 4 * traffic.total_read_bytes),
            (after.bytes_written - before.bytes_written, 4 * traffic.total_written_bytes),
        ):
            on_the_way = after.pool_bytes  # when the counting began, or ended
            assert measured == pytest.approx(planned, rel=0.02, abs=on_the_way)
        run.close()


def test_values_that_a_codec_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "8bit")
    run.train(1)
    before = run.content()
    run.manager.current.run.committer.finish()
    run.model(torch.randint(0, 100, (2, 8))).float().sum().backward()
    run.model.blocks[1].up.weight.grad[0, 0] = torch.inf
    with pytest.raises(swapper.StateError, match=r"blocks\.1\.up\.weight.*'(moment8|variance8|master24)'"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert_same(run.content(), before)  # the step is undone
    weight = run.model.blocks[0].up.weight
    with pytest.raises(swapper.StateError, match="variance8"):
        run.optimizer.state[weight]["exp_avg_sq"] = -torch.ones(weight.shape)
    assert_same(run.content(), before)
    run.close()


@pytest.mark.parametrize("make", [torch.optim.AdamW, OwnAdamW])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_infinite_gradient_is_refused_by_a_code_of_8_bits_and_kept_by_others(
    tmp_path: Path, value: float, make: Any
) -> None:
    contents = {}
    for codec in ("exact", "split", "bf16", "8bit"):
        run = Run(tmp_path / codec, codec, partial(make, lr=1e-3))
        run.train(1)
        run.manager.current.run.committer.finish()
        before = run.content()
        torch.manual_seed(5)
        run.model(torch.randint(0, 100, (2, 8))).float().sum().backward()
        run.model.blocks[1].up.weight.grad[3, 7] = value
        if codec == "8bit":
            with pytest.raises(swapper.StateError, match=r"blocks\.1\.up\.weight.*cannot hold"):
                run.optimizer.step()
            assert_same(run.content(), before)
        else:
            run.optimizer.step()
            contents[codec] = run.content()
        run.close()
    for codec in ("split", "bf16"):
        weight = contents[codec]["parameters"]["blocks.1.up.weight"]
        assert torch.equal(weight.isnan(), contents["exact"]["parameters"]["blocks.1.up.weight"].isnan())
        assert weight.isnan().sum() == 1
        for key in ("exp_avg", "exp_avg_sq"):
            kept, exact = (
                next(s[key] for s in contents[c]["state"].values() if not s[key].isfinite().all())
                for c in (codec, "exact")
            )
            assert torch.equal(kept.isfinite(), exact.isfinite())
            assert torch.equal(kept.isnan(), exact.isnan())


@pytest.mark.parametrize("value, codec", [(torch.nan, "moment8"), (torch.inf, "moment8"), (-1.0, "variance8")])
@pytest.mark.parametrize("update", ["step", "deferred"])
def test_state_that_is_loaded_must_fit_its_code(tmp_path: Path, value: float, codec: str, update: str) -> None:
    run = Run(tmp_path / "run", "8bit", update=update)
    run.train(1)
    before = run.content()
    number = number_of(run, run.model.blocks[0].up.weight)
    state = copy.deepcopy(run.optimizer.state_dict())
    state["state"][number]["exp_avg" if codec == "moment8" else "exp_avg_sq"][2, 2] = value
    with pytest.raises(ValueError, match=rf"blocks\.0\.up\.weight.*{codec}.*state_codec"):
        run.optimizer.load_state_dict(state)
    assert_same(run.content(), before)
    run.close()
    model = bf16_net()
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(state)
    with swapper.SwapManager(tmp_path / "other", host_memory="64MiB") as manager:
        with pytest.raises(swapper.StateError, match=rf"blocks\.0\.up\.weight.*{codec}"):
            manager.offload(model, optimizer, master_weights=torch.float32, state_codec="8bit", update=update)


WRONG = {
    "unknown name": ("9bit", {}, swapper.ConfigError, "'9bit'"),
    "unknown codec": ({"exp_avg": "split"}, {}, swapper.ConfigError, "'split' is not known for 'exp_avg'"),
    "unknown key": ({"exp_avgs": "bf16"}, {}, swapper.UnsupportedError, "keeps no 'exp_avgs'"),
    "signed": ({"exp_avg": "variance8"}, {}, swapper.UnsupportedError, "can be negative"),
    "no masters": ("split", {"master_weights": None}, swapper.ConfigError, "master_weights=torch.float32"),
    "bf16 state": ("8bit", {"master_weights": None}, swapper.UnsupportedError, "is bfloat16"),
    "a shape of its own": ({"step": "bf16"}, {}, swapper.UnsupportedError, "another shape"),
    "no name": (8, {}, swapper.ConfigError, "state_codec=8"),
}


@pytest.mark.whole
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_encoded_is_refused_by_name(tmp_path: Path, case: str) -> None:
    codec, options, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        Run(tmp_path / "run", codec, host_memory="64MiB", **options)
    assert not list((tmp_path / "run").glob("*.swap"))


def test_fp16_masters_are_refused(tmp_path: Path) -> None:
    with swapper.SwapManager(tmp_path / "run", host_memory="64MiB") as manager:
        model = Net().half()
        with pytest.raises(swapper.UnsupportedError, match="is float16"):
            manager.offload(model, adamw(model.parameters()), master_weights=torch.float32, state_codec="split")


@pytest.mark.parametrize("before, now", [("8bit", "bf16"), ("exact", "8bit"), ("split", "exact")])
def test_a_run_keeps_its_codecs(tmp_path: Path, before: str, now: str) -> None:
    run = Run(tmp_path / "run", before)
    run.train(1)
    run.close()
    with pytest.raises(swapper.CheckpointError, match="a run keeps its codecs"):
        Run(tmp_path / "run", now, host_memory="64MiB")
    Run(tmp_path / "run", before, host_memory="64MiB").close()


def test_shards_have_the_state_of_the_whole_model(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = run_python(*torchrun, Path(fsdp_codecs.__file__), tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert sorted(done.stdout.splitlines()) == ["rank 0: same", "rank 1: same"]


@pytest.mark.whole
@pytest.mark.parametrize(
    "codec, beta2, is_warned", [("bf16", 0.999, True), ("bf16", 0.99, False), ("8bit", 0.999, False)]
)
def test_second_moments_that_would_not_fall_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str, beta2: float, is_warned: bool
) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, beta2))
    with swapper.SwapManager(tmp_path, host_memory="8MiB") as manager:
        manager.offload(model, optimizer, state_codec=codec)
    assert ("second moments in bf16 do not fall with beta2=0.999" in caplog.text) == is_warned
