"""The planner: what a step would take on a cluster, for each way to synchronize (pure functions).

advice.py    which way to choose, from when the others pay, and the plan as text
cluster.py   hosts, ranks, cores, memory, and the link between hosts
costs.py     what one bucket costs on a cluster
job.py       the gradients in the order in which they become ready, the time of the computation, and the buckets
machine.py   what synchronization costs on a machine, as `syncline bench --calibrate` measures it
options.py   what can be chosen
predict.py   from a job, a cluster and a machine to the timeline of a step, the bytes and the memory of each option
"""
