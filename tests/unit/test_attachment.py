"""Hooks and their models: names in wrappers, frozen layers, hooks that nobody calls."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import commhooks
import ddp_core
from commhooks import HookState, comm_hook
from commhooks.classic import quantization_perchannel_hook
from commhooks.core._names import plain_name, plain_names
from commhooks.errors import RegistrationError
from commhooks.hook import _parameters as _model
from commhooks.hook import as_hook
from commhooks.hook._attachment import ShardedModelGuard
from ddp_core import DistributedDataParallel as CoreDDP
from tests.unit.one_rank import KINDS, layers, run_steps

pytestmark = pytest.mark.usefixtures("one_rank", "warnings_are_errors", "few_objects")


@pytest.fixture
def few_objects():
    """Lets the many collections here look at a test's own objects, not at all that was imported."""
    gc.freeze()


# ---- names


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("module.module._orig_mod.0.weight", "0.weight"),
        ("layers.0._checkpoint_wrapped_module.mlp.bias", "layers.0.mlp.bias"),
        ("_fsdp_wrapped_module.layers._fsdp_wrapped_module.bias", "layers.bias"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("module", "module"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name, plain):
    assert plain_name(name) == plain
    assert plain_name(plain) == plain


def test_names_that_would_be_the_same_stay_as_they_are():
    names = ["module.w", "w", "module.v", "_orig_mod.module.w", "_orig_mod"]
    assert plain_names(names) == {
        "module.w": "module.w",
        "w": "w",
        "module.v": "v",
        "_orig_mod.module.w": "_orig_mod.module.w",
        "_orig_mod": "_orig_mod",
    }


def wrapped(how):
    model = layers()
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "checkpointed":
        model[1] = checkpoint_wrapper(model[1])
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_moves_between_wrapped_and_plain_models(kind):
    values, names = {}, {}
    hows = ("plain", "compiled", "checkpointed")
    states = {}
    for how in hows:
        model = kind(wrapped(how))
        hook = commhooks.register(model, "powersgd", rank=1)
        run_steps(model)
        states[how] = hook.state_dict()
        names[how] = sorted(parameter.name for parameter in hook.parameters)
        assert hook.residual("1.weight") is not None
        assert torch.equal(hook.residual("_orig_mod.1.weight"), hook.residual("1.weight"))
        values[how] = hook
    assert names["plain"] == names["compiled"] == names["checkpointed"]
    for saved in hows:
        for here in hows:
            values[here].load_state_dict(states[saved])
            assert torch.equal(
                values[here].residual("0.weight"), values[saved].residual("0.weight")
            )


def test_a_state_saved_by_full_names_loads(monkeypatch):
    with monkeypatch.context() as before:  # as names were saved before wrappers were left out
        before.setattr(_model, "plain_names", lambda names: {n: f"_orig_mod.{n}" for n in names})
        model = DistributedDataParallel(layers())
        hook = commhooks.register(model, "powersgd", rank=1)
        run_steps(model)
        state, wanted = hook.state_dict(), hook.residual("_orig_mod.0.weight")
    assert "_orig_mod.0.weight" in state["rank0"]["memory"]["residual"]
    other = DistributedDataParallel(layers())
    again = commhooks.register(other, "powersgd", rank=1)
    again.load_state_dict(state)
    assert torch.equal(again.residual("0.weight"), wanted)
    run_steps(other)


def test_a_layout_by_the_scheme_sees_the_names_that_the_scheme_sees():
    rules = [commhooks.Rule(commhooks.schemes.Dense(), name="0.*")]
    scheme = commhooks.PerParameter(rules, default=commhooks.make("powersgd", rank=1))
    model = ddp_core.DistributedDataParallel(torch.compile(layers(), backend="eager"))
    commhooks.register(model, scheme, layout="scheme")
    run_steps(model, 3)
    buckets = [bucket.names for bucket in model.reducer.buckets]
    for names in buckets:
        assert len({"_orig_mod.0." in name for name in names}) == 1


# ---- frozen layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_may_be_frozen_between_wrapping_and_registering(kind):
    model = layers()
    ddp = kind(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    hook = commhooks.register(ddp, "powersgd", rank=1)
    assert len(hook.parameters) == 6
    run_steps(ddp)
    assert model[0].weight.grad is None
    assert hook.step == 1
    state = hook.state_dict()
    assert "0.weight" in state["rank0"]["memory"]["residual"]
    hook.load_state_dict(state)
    model[0].requires_grad_(True)
    run_steps(ddp)
    run_steps(ddp)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("when", ["before register", "in training"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_unfrozen_warns_once_and_our_class_refuses_it(kind, when):
    model = layers()
    model[1].requires_grad_(False)
    ddp = kind(model)
    if when == "before register":
        model[1].requires_grad_(True)
    hook = commhooks.register(ddp, "powersgd", rank=1)
    assert {parameter.name[0] for parameter in hook.parameters} == {"0", "2"}
    if when == "in training":
        run_steps(ddp, 5)
        model[1].requires_grad_(True)
    warns = pytest.warns(RuntimeWarning, match="1.weight, 1.bias did not require a gradient")
    if kind is CoreDDP:
        with warns, pytest.raises(RuntimeError, match="bias was frozen when Distributed"):
            run_steps(ddp)
        return
    with warns:
        run_steps(ddp)
    run_steps(ddp, 3)


def test_a_layer_may_be_trained_once_it_is_wrapped_anew():
    model = layers()
    model[1].requires_grad_(False)
    old = ddp_core.DistributedDataParallel(model)
    run_steps(old)
    model[1].requires_grad_(True)
    run_steps(ddp_core.DistributedDataParallel(model))
    model[1].requires_grad_(False)
    again = ddp_core.DistributedDataParallel(model)
    model[1].requires_grad_(True)
    del again
    gc.collect()
    del old
    gc.collect()
    run_steps(model)  # by itself


def test_an_ignored_parameter_does_not_warn():
    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["1.weight", "1.bias"]
    )
    ddp = DistributedDataParallel(model)
    commhooks.register(ddp, "none")
    run_steps(ddp)


# ---- a hook that is never called


def train_beside(ddp, times=3):
    for _ in range(times):
        ddp.module.zero_grad()
        ddp.module(torch.ones(2, 8)).sum().backward()


def drop(*names, scope):
    for name in names:
        del scope[name]
    gc.collect()


def test_a_hook_that_was_refused_does_not_warn_as_well(recwarn):
    ddp = DistributedDataParallel(layers(), process_group=commhooks.process_group("int8"))
    with pytest.raises(RegistrationError, match="with a plain group"):
        commhooks.register(ddp, "int8")
    gc.collect()
    assert not [warning for warning in recwarn if "never called" in str(warning.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_whose_model_trained_without_it_warns_when_it_is_dropped(kind):
    ddp = kind(layers())
    held = {"state": HookState("int8", ddp)}
    run_steps(ddp, 3)
    with pytest.warns(
        RuntimeWarning, match=r"never called, though its model was trained.*Lightning"
    ):
        drop("state", scope=held)


def test_a_loss_computed_beside_the_wrapper_warns_when_the_hook_is_dropped():
    held = {"ddp": DistributedDataParallel(layers())}
    held["state"] = HookState("int8", held["ddp"])  # and never registered
    train_beside(held["ddp"])
    with pytest.warns(RuntimeWarning, match=r"HookState\(.*never called"):
        drop("ddp", "state", scope=held)


@pytest.mark.parametrize(
    "case", ["nothing", "one step", "no_sync", "another hook", "called", "described", "diloco"]
)
def test_a_state_that_did_what_was_asked_of_it_says_nothing(case):
    ddp = DistributedDataParallel(layers())
    if case == "diloco":
        ddp.register_comm_hook(None, commhooks.noop_hook)
        outer = commhooks.DiLoCo(ddp, "none", every=100)
        run_steps(ddp, 3)
        outer.close()
        held = {"outer": outer}
        del outer
    else:
        held = {"state": HookState("int8", ddp)}
    if case == "one step":
        run_steps(ddp)
    elif case == "no_sync":
        with ddp.no_sync():
            run_steps(ddp, 3)
    elif case == "another hook":
        commhooks.register(ddp, "none")
        run_steps(ddp, 3)
    elif case == "called":
        ddp.register_comm_hook(held["state"], comm_hook)
        run_steps(ddp, 3)
    elif case == "described":
        repr(held["state"])
        held["state"].state_dict()
    drop(*held, scope=held)


def test_few_gradients_are_watched():
    ddp = DistributedDataParallel(layers(200))
    commhooks.register(ddp, "int8")
    watched = [bool(parameter._post_accumulate_grad_hooks) for parameter in ddp.parameters()]
    assert watched[0]
    assert watched[-1]
    assert sum(watched) < 40
    copy.deepcopy(ddp.module)


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_state_without_a_model_warns_in_a_job_of_several(world_size, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # destroyed by then
    monkeypatch.setenv("WORLD_SIZE", world_size)
    held = {"state": HookState("powersgd", rank=4), "described": HookState("int8")}
    repr(held["described"])
    drop("described", scope=held)
    if world_size == "1":
        drop("state", scope=held)
        return
    with pytest.warns(RuntimeWarning, match="was never called: no gradient was averaged by it"):
        drop("state", scope=held)


def test_a_discarded_forward_pass_with_delayed_parameters_is_no_missing_hook():
    module = layers()
    ddp = CoreDDP(
        module,
        delay_all_reduce_named_params=[("2.weight", module[2].weight)],
        param_to_hook_all_reduce=module[0].weight,
    )
    commhooks.register(ddp, "powersgd", rank=1)
    ddp(torch.ones(2, 8))
    assert module[2].weight.grad is not None  # made by the forward pass
    ddp(torch.ones(2, 8)).sum().backward()


# ---- wrong use


def test_a_residual_that_was_asked_for_stays_what_it_is():
    ddp = DistributedDataParallel(layers())
    hook = commhooks.register(ddp, "topk", ratio=0.1)
    for _ in range(2):  # buckets are others after the first step, and so are their buffers
        run_steps(ddp)
    residual = hook.residual("0.weight")
    before = residual.clone()
    for value in (2.0, 3.0, 4.0):  # memory fills two buffers in turn
        run_steps(ddp, value=value)
        assert torch.equal(residual, before)
        assert not torch.equal(hook.residual("0.weight"), before)


def test_quantization_per_channel_is_by_blocks_of_the_size_given():
    gradients = []
    for size in (16, 64):
        ddp = DistributedDataParallel(layers(1))
        hook = functools.partial(quantization_perchannel_hook, bucket_size=size)
        ddp.register_comm_hook(None, as_hook(hook))
        ddp(torch.arange(16.0).view(2, 8)).square().sum().backward()
        gradients.append(ddp.module[0].weight.grad)
    assert not torch.equal(*gradients)


def test_the_residual_of_no_parameter_is_an_error():
    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    model[1].bias.requires_grad_(False)
    hook = commhooks.register(DistributedDataParallel(model), "powersgd")
    for known in ("0.weight", "module.0.weight", "0.bias", "1.bias"):  # nothing kept yet, or ever
        assert hook.residual(known) is None
    with pytest.raises(
        ValueError, match=r"HookState.residual: the model has no parameter '0.wait'"
    ):
        hook.residual("0.wait")
    with pytest.raises(TypeError, match=r"takes a parameter's name, got Parameter"):
        hook.residual(model[0].weight)


def test_a_shared_parameter_is_known_by_both_names():
    model = layers()
    model[2].weight = model[0].weight
    ddp = DistributedDataParallel(model)
    hook = commhooks.register(ddp, "powersgd", rank=1)
    run_steps(ddp)
    assert hook.residual("0.weight").any()
    assert torch.equal(hook.residual("2.weight"), hook.residual("0.weight"))


def test_a_frozen_parameter_may_be_of_any_layout():
    model = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        frozen = torch.eye(4).to_sparse_csr()
    model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
    hook = HookState("powersgd", model, rank=1)
    assert hook.residual("frozen") is None


@pytest.mark.parametrize("ask", [lambda hook: hook.rank, lambda hook: hook.state_dict()])
def test_a_state_that_was_asked_before_it_has_a_model_finds_it(ask):
    hook = HookState("powersgd", rank=1)
    ask(hook)
    ddp = DistributedDataParallel(layers())
    ddp.register_comm_hook(hook, comm_hook)
    run_steps(ddp)
    assert hook.residual("0.weight") is not None


@pytest.mark.parametrize("when", ["before", "after", "by hand"])
def test_a_module_given_to_replicate_takes_a_hook(when):
    model = replicate(layers())
    if when == "after":
        run_steps(model)
        for parameter in model.parameters():
            parameter.grad = None
    if when == "by hand":
        hook = HookState("powersgd", model, rank=1)
        model.register_comm_hook(hook, comm_hook)
    else:
        hook = commhooks.register(model, "powersgd", rank=1)
    run_steps(model, 3)
    assert hook.step == 3
    assert hook.residual("1.weight") is not None
    with pytest.raises(RegistrationError, match=r"has a hook already|already has a hook"):
        commhooks.register(model, "powersgd")


@pytest.mark.parametrize("state", [None, "int8", object()])
def test_comm_hook_takes_a_hook_state(state):
    ddp = DistributedDataParallel(layers())
    ddp.register_comm_hook(state, comm_hook)
    with pytest.raises(
        TypeError, match=r"comm_hook takes a commhooks.HookState.*HookState\('int8'"
    ):
        run_steps(ddp)


def test_a_process_group_is_one():
    ddp = DistributedDataParallel(layers())
    with pytest.raises(TypeError, match=r"ProcessGroup.*got list; torch.distributed.new_group"):
        commhooks.register(ddp, "none", process_group=[0])
    with pytest.raises(RegistrationError, match="this rank is not in the group"):
        HookState("none", process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_layout_function_of_the_wrong_shape_is_an_error():
    ddp = ddp_core.DistributedDataParallel(layers())
    with pytest.raises(
        commhooks.errors.OptionError, match="cannot be called with a name and a parameter"
    ):
        commhooks.register(ddp, "none", layout=lambda name: name)
    with pytest.raises(commhooks.errors.OptionError, match="unhashable"):
        commhooks.register(ddp, "none", layout=lambda name, parameter: [name])


# torch fails with "INTERNAL ASSERT FAILED" at the next bucket that it skips, with any hook.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_a_hook_comes_before_the_first_step_where_torch_skips_buckets(kind, trained, skips):
    torch.manual_seed(0)
    net = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
    net.forward = lambda x, both: net["second"](x) if not both else net["second"](net["first"](x))
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skips}
    model = kind(net, bucket_cap_mb=0.0001, **options)
    x = torch.ones(2, 8)
    if trained:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DDP remarks that all parameters are used
            model(x, True).sum().backward()
    if kind is DistributedDataParallel and trained and skips:
        with pytest.raises(RegistrationError, match="Register before the first step"):
            commhooks.register(model, "fp16")
        return
    hook = commhooks.register(model, "fp16")
    model(x, False).sum().backward()
    assert hook.step == 1


def test_a_state_goes_with_its_last_reference() -> None:
    """No circle keeps its driver, memory and model until the collector comes by."""
    state = HookState("powersgd", layers())
    gone = weakref.ref(state)
    del state
    assert gone() is None


def held_model():
    model = CoreDDP(layers())
    with model.hold():
        model(torch.ones(2, 8)).sum().backward()
    return model


@pytest.mark.parametrize(
    "make", [held_model, lambda: ShardedModelGuard(layers(), lambda _: ())], ids=["held", "sharded"]
)
def test_a_model_may_be_collected_while_an_optimizer_calls_its_hooks(make):
    """Python may collect at any time, also while torch iterates over all hooks of optimizers."""
    watching = [make()]

    def collect(*_):
        watching.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)  # comes before those of `make`
    other = nn.Linear(2, 2)
    try:
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert not watching
