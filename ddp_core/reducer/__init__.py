"""Averages gradients in buckets, launched in order and waited for at the end of backward."""

# Modules, in the order in which to read them:
#
# _reducer      the reducer, step by step
# _parameters   which parameters it averages
# _plan         which buckets there are
# _buckets      their memory
# _autograd     autograd's accumulators, which report gradients
# _backward     a backward pass: which gradients come
# _unused       which parameters a step uses
# _step_exchange    the buckets of a step, launched and waited for in order
# _launch       one bucket to the hook or to an all-reduce
# _grad_bucket  what a hook is given
# _failures     reports between ranks, and waits with a limit
# _known        parameters that are replaced after wrapping
# _misuse       gradients that are not averaged
# _optimizer    optimizers that step in backward
# _precision    mixed precision
# _timeline     times of gradients and buckets
