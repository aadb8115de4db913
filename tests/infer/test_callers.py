"""Threads that call one loaded model share its passes: each gets what it gets alone, for one read of the weights."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import swapper
from infer.small import BUDGET, on_meta
from swapper.infer import callers, loaded_model
from swapper.integrations.transformers import from_pretrained
from swapper.modules.batched_pass import BatchedPass

LONG_S = 60.0
INPUTS = [torch.arange(length).view(1, length) * 7 % 512 for length in (32, 5, 17, 1, 9, 32, 3, 24)]


class Client(threading.Thread):
    """Runs `work`, and has its result or the exception that ended it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.result = self.work()
        except BaseException as error:
            self.error = error.with_traceback(None)
        self.work = None

    def end(self) -> Any:
        self.join(LONG_S)
        assert not self.is_alive()
        return self.result


@pytest.fixture
def patient(monkeypatch):
    """A pass awaits those that were in the last one until they come back or their thread ends."""
    monkeypatch.setattr(callers, "AWAITED_PART", 1e6)


@pytest.fixture
def model(path, opened):
    opened.append(swapper.load(on_meta(), path, host_memory=BUDGET))
    with torch.no_grad():
        opened[0](INPUTS[0])
    return opened[0]


@pytest.fixture
def expected(reference):
    with torch.no_grad():
        return [reference(tokens) for tokens in INPUTS]


def is_clean(model) -> bool:
    hooks = swapper.loaded(model)._hooks
    is_idle = not hooks._pass._callers and not hooks._running and hooks._pass._here is None
    return is_idle and not any(group.is_leased for group in hooks._groups)


def read_by(model, work: Callable[[], Any]) -> int:
    loaded = swapper.loaded(model)
    loaded._streaming.engine.drain()
    before = loaded.counters.bytes_read
    work()
    loaded._streaming.engine.drain()
    return loaded.counters.bytes_read - before


def run_clients(works: list[Callable[[], Any]]) -> list[Client]:
    clients = [Client(work) for work in works]
    for client in clients:
        client.end()
    return clients


def call_often(model, tokens, times: int, barrier: threading.Barrier) -> list[torch.Tensor]:
    barrier.wait(LONG_S)
    return [model(tokens) for _ in range(times)]


def test_eight_callers_read_what_one_reads(model, expected, patient):
    times = 6
    alone = read_by(model, lambda: run_clients([lambda: call_often(model, INPUTS[0], times, threading.Barrier(1))]))
    barrier = threading.Barrier(8)
    clients: list[Client] = []

    def run_all():
        clients.extend(
            run_clients([lambda tokens=tokens: call_often(model, tokens, times, barrier) for tokens in INPUTS])
        )

    together = read_by(model, run_all)
    for client, wanted in zip(clients, expected, strict=True):
        assert client.error is None and len(client.result) == times
        assert all(torch.equal(found, wanted) for found in client.result)
    loaded = swapper.loaded(model)
    rows = sum(tokens.unique().numel() for tokens in INPUTS) * 256 * 4 * 2  # of both embeddings, read for each caller
    first = 2 * loaded.read_bytes_a_pass  # who comes first may find the others on their way
    assert times * loaded.read_bytes_a_pass * 0.7 < alone
    assert together <= alone + times * rows + first + loaded.counters.pool_bytes
    assert is_clean(model)


def test_the_schedule_is_that_of_one_pass(model, patient):
    loaded = swapper.loaded(model)
    cycle = loaded._cycle
    expects: list[Any] = []
    pager, expect = loaded._streaming.pager, loaded._streaming.pager.expect
    pager.expect = lambda accesses: (expects.append(accesses), expect(accesses))
    barrier = threading.Barrier(4)
    run_clients([lambda tokens=tokens: call_often(model, tokens, 5, barrier) for tokens in INPUTS[:4]])
    assert not expects and loaded._cycle == cycle
    del pager.expect


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return folder, reference


PROMPTS = [torch.arange(n).view(1, n) * 31 % 1022 + 2 for n in (4, 9, 12, 1, 7)]


def generate(model, ids, **options):
    return model.generate(input_ids=ids, do_sample=False, num_beams=1, **options)


def test_generations_of_threads_are_as_alone(llama, opened):
    folder, reference = llama
    opened.append(model := from_pretrained(transformers.LlamaForCausalLM, folder, host_memory="5MiB"))
    lengths = [3 + ids.shape[1] // 4 for ids in PROMPTS]
    clients = run_clients(
        [lambda ids=ids, n=n: generate(model, ids, max_new_tokens=n) for ids, n in zip(PROMPTS, lengths, strict=True)]
    )
    for client, ids, n in zip(clients, PROMPTS, lengths, strict=True):
        assert client.error is None and torch.equal(client.result, generate(reference, ids, max_new_tokens=n))
    assert is_clean(model)


class AtToken(transformers.StoppingCriteria):
    """Calls `act` after some tokens."""

    def __init__(self, token: int, act: Callable[[], None]) -> None:
        self.token, self.act = token, act

    def __call__(self, input_ids, scores, **options):
        self.token -= 1
        if not self.token:
            self.act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def leave() -> None:
    raise ConnectionError("the client has left")


@pytest.mark.parametrize("where", ["between", "within"])
def test_the_cache_of_a_client_that_left_is_free_while_the_others_go_on(llama, opened, where):
    """It leaves by an exception between two forwards, or within one."""
    folder, reference = llama
    opened.append(model := from_pretrained(transformers.LlamaForCausalLM, folder, host_memory="5MiB"))
    caches: list[weakref.ref[Any]] = []
    freed: list[bool] = []
    forwards: list[int] = []

    def leaving() -> None:
        cache = transformers.DynamicCache(config=model.config)
        caches.append(weakref.ref(cache))
        criteria = [AtToken(3, leave)] if where == "between" else []
        generate(model, PROMPTS[1], max_new_tokens=8, cache=cache, stopping_criteria=criteria)

    def look() -> None:
        leaving_client.end()
        gc.collect()
        freed.append(caches[0]() is None)

    def stop(module, args, kwargs):
        if threading.current_thread() is leaving_client:
            forwards.append(1)
            if where == "within" and len(forwards) == 3:
                leave()

    handle = model.model.layers[1].register_forward_pre_hook(stop, with_kwargs=True)
    leaving_client = Client(leaving)
    stayer = Client(lambda: generate(model, PROMPTS[0], max_new_tokens=6, stopping_criteria=[AtToken(4, look)]))
    assert torch.equal(stayer.end(), generate(reference, PROMPTS[0], max_new_tokens=6))
    assert isinstance(leaving_client.error, ConnectionError) and len(forwards) == 3 and freed == [True]
    handle.remove()
    assert is_clean(model)


class Died(BaseException):
    """No Exception: torch runs no hook after it."""


@pytest.mark.parametrize("error", [ValueError, Died])
def test_a_caller_that_fails_in_mid_pass_leaves_the_others_unharmed(model, expected, patient, error):
    """The failing one leaves its forward in the middle while the others wait at the same layer; its thread lives on."""
    inside, others, may_end = threading.Event(), threading.Barrier(3), threading.Event()

    def fail(module, args):
        if threading.current_thread() is failing:
            inside.set()
            raise error("in mid-pass")

    def work():
        others.wait(LONG_S)
        try:
            model(INPUTS[1])
        finally:
            assert may_end.wait(LONG_S) or True

    failing = None
    handle = model.layers[3].mlp_out.register_forward_pre_hook(fail)
    failing = Client(work)
    clients = [Client(lambda n=n: call_often(model, INPUTS[n], 4, others)) for n in (0, 2)]
    for client, wanted in zip(clients, (expected[0], expected[2]), strict=True):
        assert all(torch.equal(found, wanted) for found in client.end())
    assert inside.is_set()
    may_end.set()
    failing.end()
    assert isinstance(failing.error, error)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(INPUTS[1]), expected[1])
    assert is_clean(model)


def test_an_exception_that_is_sent_to_a_waiting_caller_ends_only_that_one(model, expected):
    at_layer, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    holder = None

    def stop(module, args):
        if threading.current_thread() is holder and not at_layer.is_set():
            at_layer.set()
            assert go_on.wait(LONG_S)

    def come():
        waits.set()
        return model(INPUTS[2])

    handle = model.layers[2].register_forward_pre_hook(stop)
    holder = Client(lambda: model(INPUTS[0]))
    assert at_layer.wait(LONG_S)
    waiting = Client(come)
    assert waits.wait(LONG_S)
    await_caller(model, waiting)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(waiting.ident), ctypes.py_object(Died))
    waiting.end()
    assert isinstance(waiting.error, Died)
    go_on.set()
    assert torch.equal(holder.end(), expected[0])
    handle.remove()
    assert is_clean(model)


def await_caller(model, thread: threading.Thread) -> None:
    """Wait until `thread` is one of those that want a turn."""
    pass_ = swapper.loaded(model)._hooks._pass
    tick = threading.Event()
    for _ in range(6000):
        if any(caller.thread is thread for caller in list(pass_._callers)):
            return
        tick.wait(0.01)
    raise AssertionError("it does not come")


def test_a_newcomer_is_in_the_next_pass(model, expected, patient):
    """It comes in the middle of a pass of two, and is not overtaken: one more forward of each begins at most."""
    log: list[str] = []
    first, second, newcomer = (threading.Event() for _ in range(3))
    names: dict[threading.Thread, str] = {}
    clients: dict[str, Client] = {}

    def begin(module, args):
        log.append(names.get(threading.current_thread(), "?"))

    def middle(module, args):
        if names.get(threading.current_thread()) == "a" and not newcomer.is_set():
            newcomer.set()
            clients["c"] = Client(lambda: start("c", 2, 1))
            await_caller(model, clients["c"])
            log.append("c came")

    def start(name, index, times):
        names[threading.current_thread()] = name
        {"a": first, "b": second}.get(name, first).set()
        return [model(INPUTS[index]) for _ in range(times)]

    handles = [model.layers[0].register_forward_pre_hook(begin), model.layers[3].register_forward_pre_hook(middle)]
    clients["a"] = Client(lambda: start("a", 0, 4))
    clients["b"] = Client(lambda: start("b", 1, 4))
    for name, index in (("a", 0), ("b", 1)):
        assert all(torch.equal(found, expected[index]) for found in clients[name].end())
    assert torch.equal(clients["c"].end()[0], expected[2])
    for handle in handles:
        handle.remove()
    between = log[log.index("c came") : log.index("c")]
    assert between.count("a") <= 1 and between.count("b") <= 1, log
    assert is_clean(model)


def test_callers_that_wait_for_a_model_that_is_unloaded_are_told(model, expected):
    at_layer, go_on = threading.Event(), threading.Event()

    def stop(module, args):
        if threading.current_thread() is holder:
            at_layer.set()
            assert go_on.wait(LONG_S)

    holder = None
    model.layers[2].register_forward_pre_hook(stop)
    holder = Client(lambda: model(INPUTS[0]))
    assert at_layer.wait(LONG_S)
    unloader = Client(swapper.loaded(model).unload)
    await_caller(model, unloader)
    late = [Client(lambda: model(INPUTS[1])) for _ in range(3)]
    for client in late:
        await_caller(model, client)
    go_on.set()
    assert torch.equal(holder.end(), expected[0])
    unloader.end()
    assert unloader.error is None
    for client in late:
        client.end()
        assert isinstance(client.error, swapper.StateError) and "unloaded" in str(client.error)


def test_a_caller_need_not_wait_for_the_end_of_a_map(model, expected):
    """A forward of another thread is done while `map` still has batches, which share its pass."""
    came, done, order = threading.Event(), threading.Event(), []

    def function(tokens):
        found = [model(tokens)]
        if not came.is_set():
            came.set()
            clients.append(Client(call))
            await_caller(model, clients[0])
        while not done.is_set() and len(found) < 50:
            found.append(model(tokens))
        order.append("map")
        return found

    def call():
        found = model(INPUTS[4])
        order.append("call")
        done.set()
        return found

    clients: list[Client] = []
    with torch.no_grad():
        found = swapper.loaded(model).map(function, INPUTS[:3])
    for outputs, wanted in zip(found, expected, strict=False):
        assert 2 <= len(outputs) < 50 and all(torch.equal(output, wanted) for output in outputs)
    assert torch.equal(clients[0].end(), expected[4])
    assert order == ["call", "map", "map", "map"]
    assert is_clean(model)


def test_two_maps_of_two_threads_and_a_caller(model, expected):
    loaded = swapper.loaded(model)
    works = [lambda: loaded.map(model, INPUTS[:3]), lambda: loaded.map(model, INPUTS[3:6], at_once=2)]
    clients = run_clients([*works, lambda: [model(INPUTS[6])]])
    found = [output for client in clients for output in client.result]
    assert all(torch.equal(output, wanted) for output, wanted in zip(found, expected, strict=False))
    assert is_clean(model)


def test_a_map_within_a_map_or_a_forward_is_refused(model, expected):
    loaded = swapper.loaded(model)
    with torch.no_grad():
        with pytest.raises(swapper.StateError, match="its own map"):
            loaded.map(lambda tokens: loaded.map(model, [tokens]), INPUTS[:2])
        handle = model.layers[1].register_forward_pre_hook(lambda *_: loaded.map(model, INPUTS[:1]))
        with pytest.raises(swapper.StateError, match="its own forward"):
            model(INPUTS[0])
        handle.remove()
        assert torch.equal(model(INPUTS[0]), expected[0])
    assert is_clean(model)


def test_a_write_of_one_caller_reaches_no_other(model, expected, patient):
    """The weight is the same memory for all of them; who writes to it is told, and what it wrote is gone."""
    barrier = threading.Barrier(3)
    writing = None

    def write(module, args):
        if threading.current_thread() is writing:
            with torch.no_grad():
                module.weight.mul_(2)

    handle = model.layers[3].mlp_in.register_forward_pre_hook(write)
    writing = Client(lambda: call_often(model, INPUTS[1], 1, barrier))
    clients = [Client(lambda n=n: call_often(model, INPUTS[n], 3, barrier)) for n in (0, 2)]
    for client, wanted in zip(clients, (expected[0], expected[2]), strict=True):
        assert all(torch.equal(found, wanted) for found in client.end()), client.error
    writing.end()
    assert isinstance(writing.error, swapper.StateError) and "mlp_in.weight was changed" in str(writing.error)
    handle.remove()
    assert is_clean(model)


def test_a_gradient_is_refused_for_its_caller_only(model, expected):
    def differentiate():
        with torch.enable_grad():
            return model.layers[0](torch.ones(1, 4, 256, requires_grad=True))

    clients = run_clients([differentiate, lambda: model(INPUTS[0]), lambda: model(INPUTS[2])])
    assert isinstance(clients[0].error, swapper.StateError)
    assert torch.equal(clients[1].result, expected[0]) and torch.equal(clients[2].result, expected[2])
    assert is_clean(model)


def test_two_models_have_passes_of_their_own(path, opened, expected):
    for _ in range(2):
        opened.append(swapper.load(on_meta(), path, host_memory=BUDGET))
    clients = run_clients([lambda n=n: [opened[n % 2](INPUTS[n]) for _ in range(3)] for n in range(6)])
    for client, wanted in zip(clients, expected, strict=False):
        assert all(torch.equal(found, wanted) for found in client.result)
    assert all(is_clean(model) for model in opened)


def test_a_caller_that_waits_for_its_rows_of_an_embedding_lets_another_run(model, expected, monkeypatch):
    """Both wait at once, in a pass that both began."""
    at_layer, go_on, both = threading.Event(), threading.Event(), threading.Barrier(2)
    met: set[threading.Thread] = set()
    wait = loaded_model.wait_for_all

    def meet(tickets):
        if (me := threading.current_thread()) in clients and me not in met:
            met.add(me)
            both.wait(LONG_S)
        wait(tickets)

    def stop(module, args):
        if threading.current_thread() is holder:
            at_layer.set()
            assert go_on.wait(LONG_S)

    holder, clients = None, []
    monkeypatch.setattr(loaded_model, "wait_for_all", meet)
    handle = model.layers[2].register_forward_pre_hook(stop)
    holder = Client(lambda: model(INPUTS[0]))
    assert at_layer.wait(LONG_S)
    clients = [Client(lambda n=n: model(INPUTS[n])) for n in (1, 2)]
    for client in clients:
        await_caller(model, client)
    go_on.set()
    for client, wanted in zip([holder, *clients], expected, strict=False):
        assert torch.equal(client.end(), wanted), client.error
    assert len(met) == 2
    handle.remove()
    assert is_clean(model)


def test_callers_of_a_compiled_model(model, expected):
    compiled = torch.compile(model, backend="eager")
    clients = run_clients([lambda n=n: [compiled(INPUTS[n]) for _ in range(2)] for n in (0, 5)])
    for client, wanted in zip(clients, (expected[0], expected[5]), strict=True):
        assert all(torch.equal(found, wanted) for found in client.result)
    assert is_clean(model)


def test_a_caller_that_does_not_come_back_is_awaited_for_a_bounded_time(model, expected):
    """Its thread lives on, and does something else."""
    barrier, may_end = threading.Barrier(3), threading.Event()

    def once():
        found = call_often(model, INPUTS[1], 1, barrier)
        assert may_end.wait(LONG_S)
        return found

    gone = Client(once)
    for client, n in [(Client(lambda n=n: call_often(model, INPUTS[n], 6, barrier)), n) for n in (0, 2)]:
        assert all(torch.equal(found, expected[n]) for found in client.end())
    may_end.set()
    assert torch.equal(gone.end()[0], expected[1])
    assert is_clean(model)


def test_a_model_that_fits_is_plain_for_all_of_its_callers(path, opened, expected):
    opened.append(model := swapper.load(on_meta(), path, host_memory="1GiB"))
    barrier = threading.Barrier(8)
    clients = run_clients([lambda n=n: call_often(model, INPUTS[n], 3, barrier) for n in range(8)])
    for client, wanted in zip(clients, expected, strict=True):
        assert client.error is None and all(torch.equal(found, wanted) for found in client.result)


class Stage(nn.Module):
    """Has a weight of its own, which is leased while its child runs, which may be such a stage too."""

    def __init__(self, depth: int = 3):
        super().__init__()
        self.own = nn.Parameter(torch.randn(256, 256) / 16)
        self.child = Stage(depth - 1) if depth else nn.Linear(256, 256)

    def forward(self, x):
        return self.child(torch.relu(x @ self.own)) + x


class Ways(nn.Module):
    """Inputs take different stages, by their number of rows."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(6))

    def forward(self, x):
        for number, stage in enumerate(self.stages):
            if x.shape[0] & 1 << number:
                x = stage(x)
        return x


@pytest.mark.parametrize("seed", range(4))
def test_callers_that_go_different_ways_share_the_memory_that_is_enough_for_one(tmp_path, opened, monkeypatch, seed):
    """Whichever of those with most leases goes first."""
    choose = random.Random(seed).choice
    monkeypatch.setattr(BatchedPass, "_next", lambda self, waiting: choose(waiting))
    torch.manual_seed(0)
    reference = Ways().eval()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")

    def load(budget):
        with torch.device("meta"):
            model = Ways().eval()
        return swapper.load(model, tmp_path / "model.safetensors", host_memory=budget)

    with pytest.raises(swapper.BudgetError) as refusal:
        load("64KiB")
    opened.append(model := load(refusal.value.smallest_bytes))
    barrier = threading.Barrier(6)
    inputs = [torch.randn(rows, 256) for rows in (63, 1, 42, 21, 56, 7)]
    clients = run_clients([lambda x=x: call_often(model, x, 4, barrier) for x in inputs])
    with torch.no_grad():
        for client, x in zip(clients, inputs, strict=True):
            assert client.error is None, client.error
            assert all(torch.equal(found, reference(x)) for found in client.result)
    assert is_clean(model)


class Arrivals:
    """Clients that come, fail and leave when others reach a layer, as a seed says."""

    def __init__(self, model, expected, seed: int) -> None:
        self.model, self.expected = model, expected
        self.random = random.Random(seed)
        self.count = self.random.randint(2, 6)
        self.times = [self.random.randint(1, 4) for _ in range(self.count)]
        self.fails = {
            n: self.random.choice([ValueError, Died]) for n in range(self.count) if self.random.random() < 0.3
        }
        self.fails_at = {n: (self.random.randint(1, self.times[n]), self.random.randint(0, 5)) for n in self.fails}
        # client n comes when n - 1 has called this many layers in all; 0: at once
        self.comes_at = [0] + [self.random.choice([0, 0, self.random.randint(1, 9)]) for _ in range(self.count - 1)]
        self.events = [threading.Event() for _ in range(self.count)]
        self.numbers: dict[threading.Thread, int] = {}
        self.calls = [0] * self.count

    def layer(self, index: int):
        def called(module, args):
            number = self.numbers.get(threading.current_thread())
            if number is None:
                return
            self.calls[number] += 1
            if number + 1 < self.count and self.calls[number] >= self.comes_at[number + 1]:
                self.events[number + 1].set()
            if self.fails_at.get(number) == (self.forwards[number], index):
                raise self.fails[number]("as the seed says")

        return called

    def client(self, number: int):
        self.numbers[threading.current_thread()] = number
        try:
            assert self.events[number].wait(LONG_S)
            found = []
            for _ in range(self.times[number]):
                self.forwards[number] += 1
                found.append(self.model(INPUTS[number]))
            return found
        finally:
            if number + 1 < self.count:
                self.events[number + 1].set()

    def check(self) -> None:
        self.forwards = [0] * self.count
        self.events[0].set()
        for number, comes in enumerate(self.comes_at):
            if not comes:
                self.events[number].set()
        handles = [layer.register_forward_pre_hook(self.layer(n)) for n, layer in enumerate(self.model.layers)]
        clients = [Client(lambda n=n: self.client(n)) for n in range(self.count)]
        for number, client in enumerate(clients):
            client.end()
            assert type(client.error) is self.fails.get(number, type(None)), client.error
            if client.error is None:
                assert len(client.result) == self.times[number]
                assert all(torch.equal(found, self.expected[number]) for found in client.result)
        for handle in handles:
            handle.remove()
        pass_ = swapper.loaded(self.model)._hooks._pass
        with torch.no_grad():
            assert torch.equal(self.model(INPUTS[0]), self.expected[0])
        assert is_clean(self.model), vars(pass_)


@pytest.mark.parametrize("seed", range(40))
def test_arrivals_and_failures_in_any_order(model, expected, seed):
    Arrivals(model, expected, seed).check()
