# %% [markdown]
# # The seven figures, cell by cell
#
# Each case runs what has no record yet under the profile, then shows its table and figure, measured beside published.
# A hollow bar did not pass the gate, a cross is a size that failed. The last cells judge the paper's claims. The same
# in a terminal: `./run.sh case all --profile demo`, then `./run.sh verify`.
#
# `python -m papers.report.notebook` writes this notebook from `notebooks/ae.py`; its code is in the harness.

# %% [markdown]
# Profiles: `demo` (minutes, on a CPU), `quick` (one GPU), `paper` (the published sizes), `fit` (scaled to
# this machine); `None` is `quick` where there is a GPU, else `demo`. `MACHINE = "v100-vm"` gives the runs the memories
# of the published machine.

# %%
from harness.base.checkout import ROOT
from papers.report.notebook import clean_up, show_case, show_claims, show_minutes, show_neighbors

# %% tags=["parameters"]
PROFILE, MACHINE, RESULTS = None, None, ROOT / "results"

# %% [markdown]
# ## Before you start: who else is on the device, and how long each case takes from here

# %%
show_neighbors()
show_minutes(PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## One run of yours, as in a terminal

# %% tags=["skip-execution"]
# !bash "{ROOT}/run.sh" -m stronghold -l 4 -h 256 -b 2 --results "{RESULTS}"

# %% [markdown]
# ## Case 1, Figure 6a: the largest size that each method trains

# %%
show_case(1, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 2, Figure 7a: STRONGHOLD beside each baseline at that one's largest size

# %%
show_case(2, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 3, Figure 8a: all methods at one size that all of them train

# %%
show_case(3, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 4, Figure 8b: the time of a step as the model grows

# %%
show_case(4, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 5, Figure 9: what the window changes

# %%
show_case(5, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 6: many models at once, beside one after another

# %%
show_case(6, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## Case 7: pipelines on machines that come and go (Varuna)

# %%
show_case(7, PROFILE, MACHINE, RESULTS)

# %% [markdown]
# ## The claims, by what was measured here

# %%
show_claims(RESULTS)

# %% [markdown]
# ## The claims, by the numbers that were published

# %%
show_claims(RESULTS, against="published")

# %% [markdown]
# ## Clean up: what killed runs left; records stay

# %%
clean_up(RESULTS)
