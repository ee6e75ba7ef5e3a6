"""Exporters: observers that pass the events of a run to TensorBoard, OpenTelemetry or Prometheus.

Imports: faces, checks, user_code, events.

Each exporter is a thin layer on the client library of its tool. The library is imported when an exporter is made.

base.py           what exporters share: the import of a client library, its errors, and which event changes which metric
opentelemetry.py  `OpenTelemetry`: spans and metrics
prometheus.py     `Prometheus`: counters, gauges and histograms
tensorboard.py    `TensorBoard`: scalars and texts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncline.faces import hand_out

if TYPE_CHECKING:
    from syncline.exporters.opentelemetry import OpenTelemetry as OpenTelemetry
    from syncline.exporters.prometheus import Prometheus as Prometheus
    from syncline.exporters.tensorboard import TensorBoard as TensorBoard

hand_out(__name__)  # a program imports only the client library that it uses
