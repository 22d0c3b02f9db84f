"""What a run tells while it trains: its table, its pace, its samples, and the services that show them."""

from riftco.training.tracking.tracker import RunTracker, open_tracking
from riftco.training.tracking.watch import RunFacts, RunWatch, beginning, run_facts

__all__ = ["RunFacts", "RunTracker", "RunWatch", "beginning", "open_tracking", "run_facts"]
