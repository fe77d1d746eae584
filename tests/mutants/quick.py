"""A plugin for the mutants' runs: one failing example is enough, and need not be the simplest."""

from hypothesis import Phase, settings

settings.register_profile("quick", phases=(Phase.explicit, Phase.generate), deadline=None)
settings.load_profile("quick")
