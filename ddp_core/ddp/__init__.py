"""Wraps a model in DistributedDataParallel, with the arguments and names of torch's class."""

# Modules, in the order in which to read them:
#
# _ddp                                         DistributedDataParallel
# _construct                                   checks of its arguments
# _ddp_state                                       what it is made of
# _forward                                     before and after a forward pass
# _hooks                                       register_comm_hook and layouts
# _replica                                     buffers, parameters and inputs that ranks share
# _agreement                                   what ranks compare when it is made
# _delayed                                     parameters that are averaged together
# _compile                                     torch.compile
# _tensor_parallel                             parameters that are DTensors
# _logging_data, _torch_names, _torch_reducer  names of torch's class and its reducer
