"""Runs collectives that schemes request; knows nothing of DistributedDataParallel."""

# Modules, in the order in which to read them:
#
# _collectives   collectives as requests
# _task          one exchange: a generator of requests, its future, its times
# _lanes         the driver for host backends: a queue and a process group per round
# _lane_groups   the groups
# _streams       the driver for devices with streams, and the choice between both
# _pairs         all-to-all and all-gather as messages between pairs
# _shared_store  the store of a group, asked with a limit
# _clocks        times of the host and of devices
# _devices       memory on devices with streams
# _simulate      exchanges of simulated ranks
# _errors        errors, and how they list names and ranks
