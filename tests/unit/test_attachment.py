"""Models in wrappers, frozen layers, hooks that nobody calls; on one rank."""

import copy
import functools
import gc
import pickle
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
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import commhooks
import ddp_core
from commhooks import HookState, comm_hook
from commhooks.classic import quantization_perchannel_hook
from commhooks.core._names import plain_name, plain_names
from commhooks.errors import RegistrationError
from commhooks.hook import _parameters as _model
from commhooks.hook import as_hook
from commhooks.hook._attachment import ShardedParameters
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import MixedPrecision
from ddp_core.reducer._known import KnownParameters

KINDS = [DistributedDataParallel, ddp_core.DistributedDataParallel]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def warnings_are_errors(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def step(model, value=1.0):
    model.zero_grad()
    model(torch.full((2, 8), value, requires_grad=True)).sum().backward()


def train(model, steps):
    for _ in range(steps):
        step(model)


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
        step(model)
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


def test_a_summary_goes_on_where_an_earlier_state_was_loaded():
    model = DistributedDataParallel(layers())
    hook = commhooks.register(model, "int8")
    state = hook.state_dict()
    for _ in range(3):
        step(model)
    hook.switch("bf16")
    hook.switch("int8")
    assert "nothing has been exchanged yet" in hook.summary()
    hook.load_state_dict(state)
    step(model)
    assert "nothing has been exchanged yet" not in hook.summary()
    assert set(hook.report().step) == {0}


def test_a_state_saved_by_full_names_loads(monkeypatch):
    with monkeypatch.context() as before:  # as names were saved before wrappers were left out
        before.setattr(_model, "plain_names", lambda names: {n: f"_orig_mod.{n}" for n in names})
        model = DistributedDataParallel(layers())
        hook = commhooks.register(model, "powersgd", rank=1)
        step(model)
        state, wanted = hook.state_dict(), hook.residual("_orig_mod.0.weight")
    assert "_orig_mod.0.weight" in state["rank0"]["memory"]["residual"]
    other = DistributedDataParallel(layers())
    again = commhooks.register(other, "powersgd", rank=1)
    again.load_state_dict(state)
    assert torch.equal(again.residual("0.weight"), wanted)
    step(other)


def test_a_layout_by_the_scheme_sees_the_names_that_the_scheme_sees():
    rules = [commhooks.Rule(commhooks.schemes.Dense(), name="0.*")]
    scheme = commhooks.PerParameter(rules, default=commhooks.make("powersgd", rank=1))
    model = ddp_core.DistributedDataParallel(torch.compile(layers(), backend="eager"))
    commhooks.register(model, scheme, layout="scheme")
    for _ in range(3):
        step(model)
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
    step(ddp)
    assert model[0].weight.grad is None
    assert hook.step == 1
    state = hook.state_dict()
    assert "0.weight" in state["rank0"]["memory"]["residual"]
    hook.load_state_dict(state)
    model[0].requires_grad_(True)
    step(ddp)
    step(ddp)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("when", ["before register", "in training"])
def test_a_layer_that_is_unfrozen_is_told_of_once(when):
    model = layers()
    model[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    if when == "before register":
        model[1].requires_grad_(True)
    hook = commhooks.register(ddp, "powersgd", rank=1)
    assert {parameter.name[0] for parameter in hook.parameters} == {"0", "2"}
    if when == "in training":
        for _ in range(5):
            step(ddp)
        model[1].requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="1.weight, 1.bias did not require a gradient"):
        step(ddp)
    for _ in range(3):
        step(ddp)


@pytest.mark.parametrize("when", ["before register", "in training"])
def test_our_class_refuses_the_gradient_of_a_layer_that_is_unfrozen(when):
    model = layers()
    model[1].requires_grad_(False)
    ddp = ddp_core.DistributedDataParallel(model)
    if when == "before register":
        model[1].requires_grad_(True)
    hook = commhooks.register(ddp, "powersgd", rank=1)
    assert {parameter.name[0] for parameter in hook.parameters} == {"0", "2"}
    if when == "in training":
        step(ddp)
        model[1].requires_grad_(True)
    told = pytest.warns(RuntimeWarning, match="did not require a gradient")
    with told, pytest.raises(RuntimeError, match="bias was frozen when Distributed"):
        step(ddp)


def test_a_layer_may_be_trained_once_it_is_wrapped_anew():
    model = layers()
    model[1].requires_grad_(False)
    old = ddp_core.DistributedDataParallel(model)
    step(old)
    model[1].requires_grad_(True)
    step(ddp_core.DistributedDataParallel(model))
    model[1].requires_grad_(False)
    again = ddp_core.DistributedDataParallel(model)
    model[1].requires_grad_(True)
    del again
    gc.collect()
    del old
    gc.collect()
    step(model)  # by itself


def test_an_ignored_parameter_is_not_told_of():
    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["1.weight", "1.bias"]
    )
    ddp = DistributedDataParallel(model)
    commhooks.register(ddp, "none")
    step(ddp)


# ---- a hook that is never called


def train_beside(ddp, times=3):
    for _ in range(times):
        ddp.module.zero_grad()
        ddp.module(torch.ones(2, 8)).sum().backward()


def drop(*names, scope):
    for name in names:
        del scope[name]
    gc.collect()


def test_no_compression_has_the_name_that_pages_give_it():
    assert repr(HookState("none")) == "HookState(none, step=0)"
    assert repr(HookState("allreduce")) == "HookState(none, step=0)"


def test_a_hook_that_was_refused_does_not_warn_as_well(recwarn):
    ddp = DistributedDataParallel(layers(), process_group=commhooks.process_group("int8"))
    with pytest.raises(RegistrationError, match="with a plain group"):
        commhooks.register(ddp, "int8")
    gc.collect()
    assert not [one for one in recwarn if "never called" in str(one.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_whose_model_trained_without_it_warns_when_it_is_dropped(kind):
    ddp = kind(layers())
    held = {"state": HookState("int8", ddp)}
    for _ in range(3):
        step(ddp)
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
    "what", ["nothing", "one step", "no_sync", "another hook", "called", "described", "diloco"]
)
def test_a_state_that_did_what_was_asked_of_it_says_nothing(what):
    ddp = DistributedDataParallel(layers())
    if what == "diloco":
        ddp.register_comm_hook(None, commhooks.noop_hook)
        outer = commhooks.DiLoCo(ddp, "none", every=100)
        for _ in range(3):
            step(ddp)
        outer.close()
        held = {"outer": outer}
        del outer
    else:
        held = {"state": HookState("int8", ddp)}
    if what == "one step":
        step(ddp)
    elif what == "no_sync":
        with ddp.no_sync():
            for _ in range(3):
                step(ddp)
    elif what == "another hook":
        commhooks.register(ddp, "none")
        for _ in range(3):
            step(ddp)
    elif what == "called":
        ddp.register_comm_hook(held["state"], comm_hook)
        for _ in range(3):
            step(ddp)
    elif what == "described":
        repr(held["state"])
        held["state"].state_dict()
    drop(*held, scope=held)


def test_few_gradients_are_watched():
    ddp = DistributedDataParallel(layers(200))
    commhooks.register(ddp, "int8")
    watched = [bool(one._post_accumulate_grad_hooks) for one in ddp.parameters()]
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


# ---- other parameters than those that were wrapped, and gradients beside the wrapper


HOOKED = [(DistributedDataParallel, "int8"), (CoreDDP, None), (CoreDDP, "int8")]


def trained(kind, scheme, model=None, **options):
    ddp = kind(layers() if model is None else model, **options)
    hook = None if scheme is None else commhooks.register(ddp, scheme)
    for _ in range(2):
        step(ddp)
    return ddp, hook


def assign(ddp):
    ddp.load_state_dict({k: v.clone() for k, v in ddp.state_dict().items()}, assign=True)


def overwrite(ddp):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    ddp.bfloat16().float()
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def new_layer(ddp):
    ddp.module.add_module("new", nn.Linear(8, 8))


def one_weight(ddp):
    ddp.module[1].weight = nn.Parameter(ddp.module[1].weight.detach().clone())


def tied(ddp):
    ddp.module[1].weight = ddp.module[0].weight


def parametrized(ddp):
    nn.utils.parametrize.register_parametrization(ddp.module[1], "weight", nn.Identity())


CHANGES = {
    parametrized: r"1.weight was of another dtype.*Tensor\.set_",
    assign: "2.bias is another object than those that were wrapped",
    overwrite: "2.bias is another object than those that were wrapped",
    one_weight: "1.weight is another object than those that were wrapped",
    new_layer: "new.bias is another object than those that were wrapped",
    tied: "the model has no parameter 1.weight any more",
    lambda ddp: ddp.double(): "is of torch.float64 on cpu now, and was of torch.float32",
    lambda ddp: ddp.module[1].double(): "1.weight is of torch.float64",
    lambda ddp: ddp.double().float(): "was of another dtype, or on another device, for a while",
    lambda ddp: ddp.module[1].double().float(): r"1\.\w+ was of another dtype",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items())
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_change_of_the_parameters_is_an_error_in_the_next_step(kind, scheme, change, reason):
    ddp, _ = trained(kind, scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of set_overwrite_module_params_on_conversion
        change(ddp)
    # Who tries a converted model again meets the same error: it comes before the forward pass.
    for _ in range(2 if "was of" in reason else 1):
        with pytest.raises(RuntimeError, match=reason):
            ddp(torch.ones(2, 8, dtype=next(ddp.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_converted_model_is_found_behind_layers_that_are_frozen_now(kind, scheme):
    ddp, _ = trained(kind, scheme, layers(8), find_unused_parameters=True)
    ddp.module[:6].requires_grad_(False)
    ddp.double()
    for _ in range(3):  # whoever tries again meets the same error
        with pytest.raises(RuntimeError, match=r"6\.\w+ is of torch.float64"):
            ddp(torch.ones(2, 8, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_wrappers_that_share_parameters_are_looked_for_once(kind, scheme, monkeypatch):
    model = layers()
    both = [kind(model, find_unused_parameters=True) for _ in range(2)]
    for one in both if scheme else ():
        commhooks.register(one, scheme)
    looks, find = [], gc.get_objects
    monkeypatch.setattr("gc.get_objects", lambda: looks.append(1) or find())
    for _ in range(3):
        for one in both:
            step(one)
    assert len(looks) <= 2


def test_a_frozen_layer_may_be_swapped():
    """Torch does not swap a tensor that has weak references."""
    model = layers()
    model[0].requires_grad_(False)
    ddp = CoreDDP(model)
    step(ddp)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model[0].double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype == torch.float64


def test_reducers_of_earlier_groups_have_no_hooks():
    ddp = CoreDDP(layers(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    before = ddp.reducer
    parameter = next(ddp.parameters())
    hooks = len(parameter._post_accumulate_grad_hooks)
    ddp.change_group(dist.new_group([0]))
    assert ddp.reducer is not before
    assert not before.accumulators._handles
    assert len(parameter._post_accumulate_grad_hooks) == hooks


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_converted_layer_whose_memory_is_the_same_by_chance_is_found(kind, scheme, monkeypatch):
    monkeypatch.setattr(KnownParameters, "_present_pointers", lambda self: [])
    ddp, _ = trained(kind, scheme, layers(20), find_unused_parameters=True)
    ddp.module[13].double().float()
    with pytest.raises(RuntimeError, match=r"13\.\w+ was of another dtype"):
        train(ddp, 40)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_loss_beside_the_wrapper_is_an_error(kind, scheme, before):
    ddp = kind(layers())
    if scheme:
        commhooks.register(ddp, scheme)
    if before:
        step(ddp)
    ddp.zero_grad()
    why = "came after this step's" if before else "came without a forward pass of Distributed"
    with pytest.raises(RuntimeError, match=why):
        ddp.module(torch.ones(2, 8)).sum().backward()
    for _ in range(2):  # it goes on
        step(ddp)


# A state may find its model itself, when the ranks meet.
BY_HAND = {
    "of the model": HookState,
    "alone": lambda scheme, ddp: HookState(scheme),
    "of a group": lambda scheme, ddp: HookState(scheme, process_group=dist.group.WORLD),
    "unpickled": lambda scheme, ddp: pickle.loads(pickle.dumps(HookState(scheme))),
}


@pytest.mark.parametrize("make", BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_hook_that_was_registered_by_hand_is_guarded_from_its_first_call(kind, scheme, make):
    ddp = kind(layers())
    if scheme:
        ddp.register_comm_hook(make(scheme, ddp), comm_hook)
    for _ in range(2):
        step(ddp)
    with pytest.raises(RuntimeError, match="came after this step's"):
        ddp.module(torch.ones(2, 8)).sum().backward()
    assign(ddp)
    with pytest.raises(RuntimeError, match="another object"):
        step(ddp)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_a_layer_that_a_reentrant_checkpoint_runs_twice_is_an_error(kind, scheme):
    ddp = kind(Twice())
    if scheme:
        commhooks.register(ddp, scheme)
    with pytest.raises(RuntimeError, match="marked as ready twice"):
        train(ddp, 2)


def test_parameters_that_were_replaced_before_register_are_not_called_frozen():
    ddp = DistributedDataParallel(layers())
    one_weight(ddp)
    commhooks.register(ddp, "int8")  # no warning
    with pytest.raises(RuntimeError, match=r"1\.weight is another object"):
        step(ddp)


def swapped(ddp, x):
    """Averages of weights are put in place for a while."""
    kept = [one.data for one in ddp.parameters()]
    for one in ddp.parameters():
        one.data = one.data * 0.5
    with torch.no_grad():
        ddp(x)
    for one, value in zip(ddp.parameters(), kept, strict=True):
        one.data = value


def functional(ddp, x):
    others = {name: nn.Parameter(value.detach()) for name, value in ddp.named_parameters()}
    torch.func.functional_call(ddp, others, (x,)).sum().backward()
    torch.func.functional_call(
        ddp, {k: v.detach().requires_grad_() for k, v in others.items()}, (x,)
    ).sum().backward()


def accumulated(ddp, x):
    for _ in range(2):
        with ddp.no_sync():
            ddp(x).sum().backward()
            ddp.module(x).sum().backward()
    ddp(x).sum().backward()
    ddp.zero_grad()


def half_inside(ddp, x):
    """Torch's guide has the forward pass inside; the last backward pass averages all."""
    with ddp.no_sync():
        loss = ddp(x).sum()
    loss.backward()
    ddp(x).sum().backward()
    ddp.zero_grad()


def unused_layer(ddp, x):
    ddp.module.teacher = [layers()]
    ddp.module.add_module("teacher_of_later", layers(1))
    first = ddp.module.forward
    ddp.module.forward = lambda x: ddp.module[:3](x)
    ddp(x).sum().backward()
    ddp.module.forward = first
    del ddp.module.teacher_of_later, ddp.module.teacher


def wrapped_again(ddp, x):
    again = type(ddp)(ddp.module)
    step(again)
    ddp.zero_grad()


FINE = [
    lambda ddp, x: ddp(x),  # and no backward pass
    lambda ddp, x: torch.autograd.grad(ddp.module(x).sum(), list(ddp.parameters())),
    lambda ddp, x: ddp.eval()(x).sum().backward(),
    lambda ddp, x: ddp.module.requires_grad_(False).requires_grad_(True),
    swapped,
    functional,
    accumulated,
    half_inside,
    unused_layer,
    wrapped_again,
]


@pytest.mark.parametrize("use", FINE)
@pytest.mark.parametrize(("kind", "scheme"), HOOKED)
def test_what_is_no_mistake_is_no_error(kind, scheme, use):
    ddp, hook = trained(kind, scheme)
    use(ddp, torch.ones(2, 8))
    ddp.train()
    for _ in range(3):
        step(ddp)
    assert hook is None or hook.step >= 5


def test_the_composable_form_is_guarded():
    for change, reason in ((assign, "2.bias is another"), (nn.Module.double, "torch.float64")):
        model = replicate(layers())
        commhooks.register(model, "int8")
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match=r"gradient of [12]\.\w+ came after"):
            model[2](model[1](torch.ones(2, 8))).sum().backward()
        change(model)
        with pytest.raises(RuntimeError, match=reason):
            model(torch.ones(2, 8, dtype=model[0].weight.dtype)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_evaluated_and_not_trained(kind):
    ddp, _ = trained(kind, "powersgd")
    average = AveragedModel(ddp, use_buffers=True)
    x = torch.ones(2, 8)
    with torch.no_grad():
        average(x)
    average.eval()(x)
    average.train()
    with pytest.raises(RuntimeError, match=r"unpickled or copied.*eval\(\)"):
        average(x)
    step(ddp)


def changed_step(ddp, zero, change):
    change(ddp)
    zero.zero_grad()
    ddp(torch.ones(2, 8, dtype=ddp.module[0].weight.dtype)).sum().backward()
    zero.step()


def test_a_zero_optimizer_says_what_is_wrong_with_the_parameters():
    for change, reason in (
        (lambda ddp: ddp.module[1].requires_grad_(False), "Frozen since .* 1.weight, 1.bias"),
        (assign, "is another object"),
        (nn.Module.double, r"converted to another dtype or device \(\.double\)"),
        (lambda ddp: (ddp.zero_grad(), ddp.double()), "is of torch.float64 on cpu now"),
    ):
        ddp = CoreDDP(layers())
        zero = commhooks.ZeroOptimizer(ddp, torch.optim.SGD, lr=0.1)
        step(ddp)
        zero.step()
        with pytest.raises(RuntimeError, match=reason):
            changed_step(ddp, zero, change)


# ---- wrong use


def test_a_residual_that_was_asked_for_stays_what_it_is():
    ddp = DistributedDataParallel(layers())
    hook = commhooks.register(ddp, "topk", ratio=0.1)
    for _ in range(2):  # buckets are others after the first step, and so are their buffers
        step(ddp)
    residual = hook.residual("0.weight")
    before = residual.clone()
    for value in (2.0, 3.0, 4.0):  # memory fills two buffers in turn
        step(ddp, value)
        assert torch.equal(residual, before)
        assert not torch.equal(hook.residual("0.weight"), before)


def test_quantization_per_channel_is_by_blocks_of_the_size_that_is_told():
    found = []
    for size in (16, 64):
        ddp = DistributedDataParallel(layers(1))
        hook = functools.partial(quantization_perchannel_hook, bucket_size=size)
        ddp.register_comm_hook(None, as_hook(hook))
        ddp(torch.arange(16.0).view(2, 8)).square().sum().backward()
        found.append(ddp.module[0].weight.grad)
    assert not torch.equal(*found)


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
    step(ddp)
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
    step(ddp)
    assert hook.residual("0.weight") is not None


@pytest.mark.parametrize("when", ["before", "after", "by hand"])
def test_a_module_given_to_replicate_takes_a_hook(when):
    model = replicate(layers())
    if when == "after":
        step(model)
        for parameter in model.parameters():
            parameter.grad = None
    if when == "by hand":
        hook = HookState("powersgd", model, rank=1)
        model.register_comm_hook(hook, comm_hook)
    else:
        hook = commhooks.register(model, "powersgd", rank=1)
    for _ in range(3):
        step(model)
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
        step(ddp)


def test_a_process_group_is_one():
    ddp = DistributedDataParallel(layers())
    with pytest.raises(TypeError, match=r"ProcessGroup.*got list; torch.distributed.new_group"):
        commhooks.register(ddp, "none", process_group=[0])
    with pytest.raises(RegistrationError, match="this rank is not in the group"):
        HookState("none", process_group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_layout_function_of_the_wrong_shape_is_told_of():
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
    "make", [held_model, lambda: ShardedParameters(layers(), lambda _: ())], ids=["held", "sharded"]
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
