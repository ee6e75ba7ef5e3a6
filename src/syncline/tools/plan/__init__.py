"""The planner: what a step would take on a cluster, for each way to synchronize (pure functions).

advice.py    which way to choose, and from when the others pay
cluster.py   hosts, ranks, cores, memory, and the link between hosts
costs.py     what one bucket costs on a cluster
job.py       the gradients in the order in which they become ready, the time of the computation, and the buckets
machine.py   what synchronization costs on a machine, as `syncline bench --calibrate` measures it
options.py   what can be chosen
predict.py   from a job, a cluster and a machine to the timeline of a step, the bytes and the memory of each option
text.py      a plan as text
"""

from __future__ import annotations

from syncline.tools.plan.advice import advice_on, best_of
from syncline.tools.plan.cluster import Cluster, Engine, parse_rate, parse_seconds
from syncline.tools.plan.job import Gradient, Job, job_of_size
from syncline.tools.plan.machine import UNMEASURED, Calls, Coding, Cost, Machine, load_machine, usual_path
from syncline.tools.plan.options import (
    CAPS_MB,
    CODECS,
    Codec,
    Option,
    codec_of,
    kinds_of_options,
    with_caps,
)
from syncline.tools.plan.predict import Planner, Reduction, exposed_time
from syncline.tools.plan.text import plan_json, plan_text

__all__ = [
    "CAPS_MB",
    "CODECS",
    "UNMEASURED",
    "Calls",
    "Cluster",
    "Codec",
    "Coding",
    "Cost",
    "Engine",
    "Gradient",
    "Job",
    "Machine",
    "Option",
    "Planner",
    "Reduction",
    "advice_on",
    "best_of",
    "codec_of",
    "exposed_time",
    "job_of_size",
    "kinds_of_options",
    "load_machine",
    "parse_rate",
    "parse_seconds",
    "plan_json",
    "plan_text",
    "usual_path",
    "with_caps",
]
