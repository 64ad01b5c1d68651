"""Why a target is wrong: counterfactual solves over neighbouring conventions and inputs, ranked, within budget."""

from oracle.diagnose.merges import diagnose_merge
from oracle.diagnose.model import Diagnosis, Kind, Surroundings
from oracle.diagnose.search import diagnose

__all__ = ["Diagnosis", "Kind", "Surroundings", "diagnose", "diagnose_merge"]
