"""What a type checker sees of the library: `make type` reads it, nothing runs it. A comment that ignores an error which
is none fails, too."""

from typing_extensions import assert_type

import vitruvian

done = vitruvian.convert("run", "out", to="megatron", tp=2, config="base", dtype="bf16")
assert_type(done.digest, str)
assert_type(vitruvian.open("run").topology, dict[str, int])
assert_type(vitruvian.open("run")["huggingface"]["lm_head.weight"].shape, tuple[int, ...])
assert_type(vitruvian.open("run").as_("megatron", tp=(3, 8), with_optimizer=True), vitruvian.View)
assert_type(vitruvian.verify("out").equal, bool)
assert_type(vitruvian.diff("run", "out").tensors, tuple[vitruvian.Difference, ...])
assert_type(vitruvian.VitruvianError("").hint, str)
assert_type(vitruvian.peft2megatron("base", "adapter", "run", lora="fused", tp=2).tensors, int)
vitruvian.peft2megatron("base", "adapter", "run", lora="dora")  # type: ignore[arg-type]
vitruvian.convert("run", "out", tp="two")  # type: ignore[arg-type]
vitruvian.convert("run", "out", colour=1)  # type: ignore[call-arg]
vitruvian.convert("run", "out", to="gguf")  # type: ignore[arg-type]
