"""What Intel's NPU compiler expects of drafts that nobody has trained yet: random weights, the right shapes.

    python bench/studies/npu_drafts.py --npu-compiler "scripts/npu_compiler/compile.sh" --output DIR
    python bench/studies/npu_drafts.py --npu-compiler "scripts/npu_compiler/compile.sh" --bundle BUNDLE --output DIR
    python bench/studies/npu_drafts.py --host BUNDLE

The first writes a report per draft and platform (`DIR/smollm2-4000.json`), which `mirrorsd simulate --npu-report`
takes. Weights are int8, the head is a product of two thin matrices. All is estimated by the vendor's compiler, not
measured. The second compiles every shape of a bundle's draft instead, and goes on where an earlier run of it ended.
The third measures what the processor does before and behind a round of a bundle's draft, on one thread.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from transformers import LlamaConfig, LlamaForCausalLM

from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import static_shapes
from mirrorsd.devices.openvino.npu_blobs import draft_digest
from mirrorsd.devices.openvino.npu_graph import cut_for_npu, round_weight
from mirrorsd.devices.openvino.npu_request import HostParts
from mirrorsd.export.bundle.draft_ir import write_draft
from mirrorsd.export.checkpoints.loading import Streams, draft_shape
from mirrorsd.export.passes.graph_passes import optimise_draft
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
from mirrorsd.export.stages.attention import TREE_ATTENTION
from mirrorsd.export.stages.draft import DraftStage
from mirrorsd.families.registry import parts_of
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.contract import draft_contract
from mirrorsd.graphs.manifest import DraftBucket, DraftEntry, SourceModel
from mirrorsd.machine.npu.ahead import device_graph
from mirrorsd.machine.npu.compiler import NpuCompiler
from mirrorsd.machine.npu.report import by_use, report_document, reports_in

STAND_IN_VOCAB = 512
BUCKETS = ((4, 4), (8, 8), (16, 16), (32, 32), (128, 1))


@dataclass(frozen=True, slots=True)
class Draft:
    """Sizes of a draft: six layers, three streams in the upper two, a head of `rank`."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    rank: int


DRAFTS = {"smollm2": Draft(576, 1536, 9, 3, 49_152, 128), "8b": Draft(1024, 2816, 16, 4, 128_256, 256)}


def main() -> None:
    """Compile, or measure the host's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npu-compiler")
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--platforms", nargs="+", default=["3720", "4000", "5010"])
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--host", type=Path, metavar="BUNDLE")
    options = parser.parse_args()
    if options.host:
        print(json.dumps(host_ms(options.host)))
        return
    if options.bundle:
        compile_bundle(options)
        return
    for name in options.drafts:
        compile_draft(name, options)


def compile_bundle(options: argparse.Namespace) -> None:
    """Write the reports of a bundle's draft, after every shape."""
    manifest = read_bundle(options.bundle)
    compiler = NpuCompiler(options.npu_compiler)
    options.output.mkdir(parents=True, exist_ok=True)
    for shape in by_use(manifest.draft.buckets, manifest.draft.capacities):
        name = "x".join(map(str, shape))
        graph = device_graph(options.bundle, manifest.draft, shape)
        for platform in options.platforms:
            path = options.output / f"{options.bundle.stem}-{platform}.json"
            reports = reports_in(path) if path.is_file() else []
            if any(report.shape == name for report in reports):
                continue
            with tempfile.TemporaryDirectory() as scratch:
                reports.append(compiler.compile(graph, name, platform, Path(scratch) / "blob"))
            document = report_document(platform, reports, draft_digest(manifest))
            path.write_text(json.dumps(document, indent=1) + "\n")
            print(platform, name, reports[-1].estimated_us or reports[-1].error, flush=True)


def compile_draft(name: str, options: argparse.Namespace) -> None:
    """Write the reports of one draft."""
    with tempfile.TemporaryDirectory() as scratch:
        entry = written(DRAFTS[name], Path(scratch))
        graphs = {
            f"{rows}x{tips}x{options.slots}": as_trained(
                device_graph(Path(scratch), entry, (rows, tips, options.slots)), DRAFTS[name]
            )
            for rows, tips in BUCKETS
        }
        compiler = NpuCompiler(options.npu_compiler)
        for platform in options.platforms:
            reports = [
                compiler.compile(graph, shape, platform, Path(scratch) / "blob") for shape, graph in graphs.items()
            ]
            path = options.output / f"{name}-{platform}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report_document(platform, reports, "random weights"), indent=1) + "\n")
            print(name, platform, {report.shape: report.estimated_us or report.error for report in reports}, flush=True)


def written(draft: Draft, folder: Path) -> DraftEntry:
    """The draft of random weights as an IR in `folder`, with a vocabulary that stands in for the real one."""
    config = LlamaConfig(
        vocab_size=STAND_IN_VOCAB,
        hidden_size=draft.hidden,
        intermediate_size=draft.mlp,
        num_hidden_layers=6,
        num_attention_heads=draft.heads,
        num_key_value_heads=draft.kv_heads,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    streams = Streams(embeddings=torch.randn(3, draft.hidden), num_stream_layers=2)
    shape = draft_shape(model, streams, target_vocab_size=STAND_IN_VOCAB, num_candidates=16, has_noise=False)
    contract = draft_contract(shape)
    model.set_attn_implementation(TREE_ATTENTION)
    stage = DraftStage(parts_of(model), contract, shape, streams=streams, context=2048, num_input_ids=STAND_IN_VOCAB)
    graph = optimise_draft(export_stage(stage, contract, Weights()))
    write_draft(graph, contract, folder / "draft.xml", "fp32")
    source = SourceModel(name="random", family="llama", licence="none", num_parameters=0)
    buckets = tuple(DraftBucket(rows=rows, tips=tips) for rows, tips in BUCKETS)
    return DraftEntry(
        source=source,
        shape=shape,
        precision="int8",
        num_stream_layers=2,
        file="draft.xml",
        buckets=buckets,
        capacities=(1024,),
    )


def as_trained(core: ov.Model, draft: Draft) -> ov.Model:
    """The device's graph with the real vocabulary behind a thin head, all products in int8."""
    (old,) = (result for result in core.get_results() if result.get_output_shape(0)[-1] == STAND_IN_VOCAB)
    head = old.input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    rng = np.random.default_rng(0)
    found = head.input_value(0)
    for rows, columns in ((draft.rank, draft.hidden), (draft.vocab, draft.rank)):
        weight = ops.constant(rng.standard_normal((rows, columns), dtype=np.float32) * 0.02)
        found = ops.matmul(found, weight, False, True).output(0)
    logits = ops.result(ops.convert(found, ov.Type.f16))
    logits.output(0).get_tensor().set_names({"handed.logits"})
    core.remove_result(old)
    core.add_results([logits])
    for node in core.get_ops():
        if node.get_type_name() == "MatMul":
            round_weight(node)
    return core


def host_ms(bundle: Path, num_rounds: int = 200) -> dict[str, float]:
    """Milliseconds before and behind a round of 8 rows, by part."""
    entry = read_bundle(bundle).draft
    core = new_core()
    model = core.read_model(bundle / entry.file)
    model.reshape(static_shapes(entry, 8, 8, min(entry.capacities)))
    host = HostParts(core, cut_for_npu(model, entry.shape, ov.Type.f16), threads=1)
    found = {}
    for name, compiled in (("before", host.before), ("after", host.after)):
        request = compiled.create_infer_request()
        for port in compiled.inputs:
            request.get_tensor(port.get_any_name()).data[:] = 0
        request.infer()
        times = []
        for _ in range(num_rounds):
            started = perf_counter()
            request.infer()
            times.append(perf_counter() - started)
        found[name] = round(1e3 * float(np.median(times)), 4)
    return found


if __name__ == "__main__":
    main()
