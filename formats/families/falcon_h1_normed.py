"""Falcon-H1 with a norm in its state spaces, before or after the gate."""

from dataclasses import replace

from formats.families import falcon_h1

FAMILY = replace(
    falcon_h1.FAMILY,
    name="falcon_h1_normed",
    model_type="falcon_h1",
    marks={"mamba_rms_norm": True},
    table=falcon_h1.table(falcon_h1.MIXER),
    requires={**falcon_h1.FAMILY.requires, "mamba_rms_norm": True},
)
