"""Seconds of one transformer layer and of the head, for one microbatch on one rank: GEMMs by their shapes, attention,
what moves memory, tensor-parallel messages with what hides them, and the all-to-alls of experts. Sums over the tables
of `layers`.

A GEMM reaches a share of the peak by its depth and the waves of its tiles (`Hardware.gemm_share`); everything else
moves memory at a share of its rate. With fp8 the GEMMs of a layer's linears have the peak of fp8, and casts move
memory; attention and the head do not change. The experts of a rank are taken to get equally many rows, which every one
of them multiplies on its own; those of the fullest rank get `MoETable.imbalance` times the mean, and the others wait
for it.

Also the links that a plan's groups of ranks communicate over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megapipe.dtypes import FP8
from megapipe.layers.attention import AttentionTable
from megapipe.layers.linear import casts
from megapipe.layers.model import LayerSpec, ModelSpec, layer_table
from megapipe.layers.moe import INDEX_BYTES, MoETable
from megapipe.layers.table import ALL_REDUCE, AttentionWork, Collectives, Documents, Gemm, RankShape, Table, ring_bytes
from megapipe.plan.activations import without_recompute
from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.topology import Topology

# each byte a layer keeps is written once and read once in the forward; a backward moves twice as much
POINTWISE_PASSES = 2.0
KERNELS = ("gemm", "attention", "pointwise")  # parts of a stage's seconds that are computed


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of F, I and W of one layer, head or stage on one rank, by what takes them: 'gemm', 'attention',
    'pointwise', 'tp', with context parallelism 'cp' (messages of attention that its computation does not hide), with
    experts 'ep', the messages of their rows, and 'host', waits for the host that launches them; and 'overhead', what a
    software stack adds to kernels.

    hidden: tensor-parallel messages that a whole backward runs under its GEMMs, so that B takes I + W - hidden.
    """

    forward: Mapping[str, float]
    inputs: Mapping[str, float]
    weights: Mapping[str, float]
    hidden: float = 0.0

    @cached_property
    def seconds(self) -> Mapping[Op, float]:
        """Seconds of F, I, W and B."""
        forward, inputs, weights = (sum(parts.values()) for parts in (self.forward, self.inputs, self.weights))
        return {Op.F: forward, Op.I: inputs, Op.W: weights, Op.B: inputs + weights - self.hidden}

    def of(self, op: Op) -> float:
        """Return the seconds of F, B, I or W."""
        return self.seconds[op]

    def __add__(self, other: OpSeconds) -> OpSeconds:
        def added(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
            return {part: one.get(part, 0.0) + two.get(part, 0.0) for part in {**one, **two}}

        inputs, weights = added(self.inputs, other.inputs), added(self.weights, other.weights)
        return OpSeconds(added(self.forward, other.forward), inputs, weights, self.hidden + other.hidden)

    def with_overhead(self, share: float) -> OpSeconds:
        """Return it with a share of the seconds of its kernels more."""
        if not share:
            return self

        def slower(parts: Mapping[str, float]) -> dict[str, float]:
            return {**parts, "overhead": share * sum(parts.get(kind, 0.0) for kind in KERNELS)}

        return OpSeconds(slower(self.forward), slower(self.inputs), slower(self.weights), self.hidden)

    def launched(self, host: float, overlaps: bool) -> OpSeconds:
        """Return it with the waits for a host that takes so many seconds to launch F, I and W.

        overlaps: the all-to-alls of experts run under other kernels, and the host launches both in the meantime.
        """
        device = sum(self.seconds[op] for op in (Op.F, Op.I, Op.W))
        if overlaps:
            device -= self.forward.get("ep", 0.0) + self.inputs.get("ep", 0.0)
        wait = max(0.0, host - device)
        return self + OpSeconds({"host": wait / 3}, {"host": wait * 2 / 3}, {}) if wait else self

    def __mul__(self, count: int) -> OpSeconds:
        def times(parts: Mapping[str, float]) -> dict[str, float]:
            return {part: count * seconds for part, seconds in parts.items()}

        return OpSeconds(times(self.forward), times(self.inputs), times(self.weights), count * self.hidden)


@dataclass(frozen=True)
class ContextLinks:
    """The links of the messages over cp: of a ring, of an exchange between all ranks, and between those of an inner
    level.
    """

    ring: Link
    exchange: Link
    inner: Link


@dataclass(frozen=True)
class ExpertLinks:
    """The links of the messages of experts.

    inside: ranks of an ep group on one node, the fewest of any rank; the others are reached over the network.
    pipelined: rows move between nodes and within them at the same time where a token goes once to a node.
    """

    etp: Link  # of a ring over etp
    node: Link
    network: Link
    ep: int
    inside: int
    pipelined: bool = False

    def shares(self) -> tuple[float, float]:
        """Return the shares of a rank's rows that go to other ranks of its node, and to other nodes, if every expert
        gets equally many.
        """
        return (self.inside - 1) / self.ep, (self.ep - self.inside) / self.ep

    def exchange(self, num_bytes: float) -> float:
        """Return the seconds of an all-to-all over ep of num_bytes a rank, its own part included.

        The links within the node and the network card of the rank work at the same time.
        """
        ways = zip(self.shares(), (self.node, self.network), strict=True)
        return max(share and share * num_bytes / link.bytes_per_second + link.latency_seconds for share, link in ways)


def expert_message_seconds(part: MoETable, shape: RankShape, links: ExpertLinks) -> tuple[float, float]:
    """Return the seconds of moving a microbatch's rows, with their weights, to the ranks of their experts, and back;
    and those of exchanging the numbers of rows first, which only a forward does.

    etp adds a gather of the rows of all ranks that share an expert, or the sum of their results. If a token
    goes once to a node: the exchange between nodes and then that within one, each at its link's rate.
    """
    # of the fullest rank, which receives more than it sends
    rows, weights = part.imbalance * part.row_bytes(shape), part.imbalance * part.num_rows(shape) * shape.wide
    counts = part.num_experts * INDEX_BYTES

    def shared(num_bytes: float) -> float:
        passed = ring_bytes(num_bytes * shape.etp, shape.etp)
        return passed / links.etp.bytes_per_second + links.etp.latency_seconds if shape.etp > 1 else 0.0

    if shape.has_levels:
        over = {"ep_nodes": links.network, "ep_places": links.node, "etp": links.etp}
        steps = [(over[name], *sent) for name, sent in part.sent_bytes(shape).items() if name != "etp" or shape.etp > 1]
        each = [part.imbalance * back / link.bytes_per_second + 3 * link.latency_seconds for link, _, back in steps]
        moved = max(each[:2]) + sum(each[2:]) if links.pipelined else sum(each)
        # between nodes the rows of pairs follow the numbers of rows
        known = sum((there - back) / link.bytes_per_second + link.latency_seconds for link, there, back in steps)
        return moved, known + links.network.latency_seconds
    sent = (links.exchange(each) + shared(each) for each in (rows, weights, rows))
    return sum(sent), links.exchange(counts) + shared(counts)


def layer_seconds(
    layer: LayerSpec,
    shape: RankShape,
    hardware: Hardware,
    tp_link: Link,
    contexts: ContextLinks | None = None,
    experts: ExpertLinks | None = None,
) -> OpSeconds:
    """Return the seconds of one transformer layer. Recomputation is part of I.

    contexts: links of the messages over cp; tp's if None. experts: without these links the messages of experts take no
    time.
    """
    clock = _Clock(shape, layer.hidden_size, hardware, tp_link)
    plain = replace(without_recompute(shape), documents=Documents())
    table, gemms = layer_table(layer.unfrozen, plain), layer.linears(shape.tp)
    columns = [gemm for gemm in gemms if gemm.is_column and not gemm.is_replicated]
    rows = [gemm for gemm in gemms if not gemm.is_column]
    mixture, of = layer.experts, {Op.W: _trained(layer, table, gemms)}

    def products(op: Op) -> float:
        of_linears = sum(clock.gemm(gemm, op) for gemm in of.get(op, gemms))
        return of_linears + (0.0 if mixture is None else clock.routed(mixture, op))

    def casts_of(op: Op) -> float:
        return clock.casts(op, of.get(op, gemms)) + (0.0 if mixture is None else clock.expert_casts(op, mixture))

    cores = [operation.attention for operation in table.operations if operation.attention is not None]
    attention = sum(map(clock.attention, cores))
    kept = sum(tensor.num_bytes for tensor in table.keeps if not tensor.in_attention_time)
    pointwise = POINTWISE_PASSES * kept / hardware.pointwise_bytes_per_second
    others = sum((operation.collectives for operation in table.operations if operation.gemm is None), Collectives())
    messages = sum(map(clock.gather, columns)) + sum(map(clock.reduction, rows)) + others.forward * clock.collective()
    moved = pointwise + casts_of(Op.F)
    biases = clock.biases(mixture) if mixture is not None else 0.0
    forward = {"gemm": products(Op.F), "attention": attention, "pointwise": moved + biases / 3, "tp": messages}
    core_backward = sum(clock.attention(core, True) for core in cores)
    if mixture is not None:
        rows_seconds, counts = (0.0, 0.0) if experts is None else expert_message_seconds(mixture, shape, experts)
        forward["ep"] = rows_seconds + counts
    again = _recomputed(layer, shape, plain, clock, forward)
    inputs = {
        "gemm": products(Op.I),
        "attention": core_backward,
        "pointwise": 2.0 * pointwise + casts_of(Op.I) + biases * 2 / 3,
        "tp": sum(clock.gather(each, Op.I) for each in rows)
        + sum(clock.reduction(each, Op.I) for each in columns)
        + others.inputs * clock.collective()
        + again.pop("tp", 0.0),
    }
    if shape.cp > 1 and layer.attention is not None:
        links = contexts or ContextLinks(tp_link, tp_link, tp_link)
        computed = attention, core_backward, again.get("attention", 0.0)
        forward["cp"], inputs["cp"], again["cp"] = _context_seconds(layer.attention, shape, links, computed)
    if mixture is not None:
        inputs["ep"] = (2 if shape.recomputes("moe") or again.pop("ep", 0.0) else 1) * rows_seconds
    in_w = layer_table(layer, plain).collectives.weights * clock.collective()
    weights = {"gemm": products(Op.W), "pointwise": casts_of(Op.W), "tp": in_w}
    backward = {part: inputs[part] + again.get(part, 0.0) for part in inputs}
    return OpSeconds(forward, backward, weights, sum(map(clock.hidden, columns))).with_overhead(hardware.stack.overhead)


def _trained(layer: LayerSpec, table: Table, gemms: Iterable[Gemm]) -> list[Gemm]:
    """Return the linears of a layer that have weight gradients."""
    trained = list(gemms)
    for operation in table.operations:
        if operation.gemm is not None and operation.name in layer.frozen:
            trained.remove(operation.gemm)
    return trained


def _context_seconds(
    part: AttentionTable, shape: RankShape, links: ContextLinks, computed: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Return what messages over cp add to attention in a forward, a backward and a recompute: those of a ring run under
    it, the others do not. computed: seconds of attention there.
    """
    kind = part.cp_comm_type
    link_of = {"cp": links.exchange if kind == "a2a" else links.ring, "cp_a2a": links.inner, "cp_p2p": links.ring}

    def exposed(sent: Mapping[str, float], seconds: float) -> float:
        took = {
            name: count / link_of[name].bytes_per_second + link_of[name].latency_seconds for name, count in sent.items()
        }
        under = took.pop("cp" if kind == "p2p" else "cp_p2p", 0.0)
        return sum(took.values()) + max(0.0, under - seconds)

    forward, back, again = map(exposed, (*part.sent_bytes(shape), part.resent_bytes(shape)), computed)
    return forward, back, again


def head_seconds(model: ModelSpec, shape: RankShape, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """Return the seconds of final norm, output layer and loss, and of multi-token prediction without its layers."""
    gemm = model.head.gemm(shape.tp)
    clock = _Clock(shape, gemm.inputs, hardware, tp_link)
    logits = model.head.logits(shape) * shape.wide
    again = 0 if shape.loss_chunk is None else 1  # logits in chunks are computed once more in a backward
    rate = hardware.pointwise_bytes_per_second
    once = OpSeconds(
        {"gemm": clock.gemm(gemm), "pointwise": 3 * logits / rate, "tp": clock.gather(gemm)},
        {
            "gemm": again * clock.gemm(gemm) + clock.gemm(gemm, Op.I),
            "pointwise": (2 + again) * logits / rate,
            "tp": clock.reduction(gemm, Op.I),
        },
        {
            "gemm": clock.gemm(gemm, Op.W) * gemm.is_trained,
            "tp": model.head.table(shape).collectives.weights * clock.collective(),
        },
        clock.hidden(gemm),
    ).with_overhead(hardware.stack.overhead)
    if not model.predictions:
        return once
    prediction, _ = model.predictions[0]  # alike
    clock, table = _Clock(shape, prediction.model.hidden_size, hardware, tp_link), prediction.projection_table(shape)
    product = {op: clock.gemm(prediction.gemm, op) for op in (Op.F, Op.I, Op.W)}
    cast = {op: clock.casts(op, [prediction.gemm]) for op in (Op.F, Op.I, Op.W)}
    moved = POINTWISE_PASSES * table.kept_bytes / rate
    messages = table.collectives
    projection = OpSeconds(
        {"gemm": product[Op.F], "pointwise": moved + cast[Op.F], "tp": messages.forward * clock.collective()},
        {"gemm": product[Op.I], "pointwise": 2.0 * moved + cast[Op.I], "tp": messages.inputs * clock.collective()},
        {"gemm": product[Op.W], "pointwise": cast[Op.W], "tp": messages.weights * clock.collective()},
    ).with_overhead(hardware.stack.overhead)
    return once + (once + projection) * len(model.predictions)


@dataclass(frozen=True)
class _Clock:
    """Seconds of single operations of a shape on some hardware."""

    shape: RankShape
    hidden_size: int
    hardware: Hardware
    link: Link

    def tokens(self, gemm: Gemm) -> int:
        """Return the tokens that a linear sees on this rank."""
        return self.shape.own_tokens if gemm.is_replicated else self.shape.tokens

    def gemm(self, gemm: Gemm, op: Op = Op.F, tokens: int | None = None) -> float:
        """Return the seconds of one product in F, I or W: by its FLOPs or by what it moves, whichever takes longer."""
        tokens, hardware = tokens or self.tokens(gemm), self.hardware
        rows, columns, depth = {
            Op.F: (tokens, gemm.outputs, gemm.inputs),
            Op.I: (tokens, gemm.inputs, gemm.outputs),
            Op.W: (gemm.inputs, gemm.outputs, tokens),
        }[op]
        dtype, operand = (FP8, 1.0) if gemm.is_fp8 else (self.shape.dtype, 2.0)
        reached = hardware.peak(dtype) * hardware.gemm_share(rows, columns, depth, gemm.is_fp8)
        moved = operand * depth * (rows + columns) + 2.0 * rows * columns
        return max(2.0 * rows * columns * depth / reached, moved / hardware.memory_bytes_per_second)

    def routed(self, part: MoETable, op: Op = Op.F) -> float:
        """Return the seconds of one product in F, I or W for all rows with the router, and with this rank's experts."""
        held, rows, shape = *self._experts(part), self.shape
        of_each = sum(self.gemm(gemm, op, rows) for gemm in part.expert_gemms(shape.etp))
        router = Gemm(part.model.hidden_size, part.num_experts, True)
        return self.gemm(router, op, shape.own_tokens) + held * of_each

    def expert_casts(self, op: Op, part: MoETable) -> float:
        """Return the seconds of the casts to fp8 for the experts of this rank, in F, I or W."""
        held, rows = self._experts(part)
        return held * self.casts(op, part.expert_gemms(self.shape.etp), rows)

    def biases(self, part: MoETable) -> float:
        """Return the seconds that a stack's kernels for the biases of experts take, forward and backward."""
        elements = part.model.add_bias_linear * part.imbalance * part.arrived_rows(self.shape) * part.model.hidden_size
        return self.hardware.stack.bias_bytes * elements / self.hardware.pointwise_bytes_per_second

    def _experts(self, part: MoETable) -> tuple[int, int]:
        """Return the number of experts on this rank, and the rows of each."""
        held = part.num_experts // self.shape.ep
        rows = part.model.moe_router_topk * self.shape.own_tokens * self.shape.etp
        return held, max(1, math.ceil(part.imbalance * rows) // held)

    def attention(self, core: AttentionWork, is_backward: bool = False) -> float:
        """Return the seconds of core attention's forward, or of its backward."""
        hardware, times = self.hardware, core.backward_forwards if is_backward else 1.0
        reached = hardware.peak(self.shape.dtype) * hardware.attention_share_of(core, is_backward)
        moved = hardware.stack.softmax_shares[is_backward] * core.moved_bytes[is_backward]
        return times * core.flops / reached + moved / hardware.pointwise_bytes_per_second

    def casts(self, op: Op, gemms: Iterable[Gemm], tokens: int | None = None) -> float:
        """Return the seconds of the casts to fp8 for these GEMMs, in F, I or W. tokens: of each, if not the rank's."""
        in_fp8 = [gemm for gemm in gemms if gemm.is_fp8]
        if not in_fp8:
            return 0.0
        cast = casts(self.shape)
        read = sum((tokens or self.tokens(gemm)) * gemm.inputs for gemm in in_fp8)
        written = sum((tokens or self.tokens(gemm)) * gemm.outputs for gemm in in_fp8)
        weights = sum(gemm.num_weights for gemm in in_fp8)
        moved = {
            Op.F: cast.inputs * read + cast.weight * weights,
            Op.I: cast.gradients * written,
            Op.W: cast.inputs_again * read + cast.gradients_again * written + cast.weight_gradient * weights,
        }[op]
        return moved / self.hardware.pointwise_bytes_per_second

    def collective(self, chunks: int = 1, width: int | None = None) -> float:
        """Return the seconds of one of `chunks` chunks of an all-gather or reduce-scatter of hidden states, or of
        `width` channels.
        """
        if self.shape.tp == 1:
            return 0.0
        num_bytes = self.shape.collective_bytes(width or self.hidden_size)
        seconds = num_bytes / chunks / self.link.bytes_per_second + self.link.latency_seconds
        return self.hardware.stack.message_times * seconds

    def gather(self, gemm: Gemm, op: Op = Op.F) -> float:
        """Return what gathering the tokens of a linear adds to its GEMM; nothing without sequence parallelism."""
        if not self.shape.sequence_parallel:
            return 0.0
        chunks = self.shape.chunks.gather
        return self._exposed(self.collective(chunks, gemm.width), chunks, gemm, op)

    def reduction(self, gemm: Gemm, op: Op = Op.F) -> float:
        """Return what the sum over tp of a linear's result adds to its GEMM: a reduce-scatter, or an all-reduce."""
        chunks = self.shape.chunks.reduce
        return self._exposed(self._passes * self.collective(chunks, gemm.width), chunks, gemm, op)

    def hidden(self, gemm: Gemm) -> float:
        """Return what a whole backward of a column-parallel linear hides.

        Under sequence parallelism its input is gathered again under the GEMM of the input gradient, which is then
        scattered under that of the weights; without, it is all-reduced there. Both are whole in B, where I alone may
        cut the reduction into chunks.
        """
        collective, passes = self.collective(width=gemm.width), self._passes
        gather = min(collective, self.gemm(gemm, Op.I)) if self.shape.sequence_parallel else 0.0
        scattered = passes * collective
        return gather + min(scattered, self.gemm(gemm, Op.W)) - (scattered - self.reduction(gemm, Op.I))

    @property
    def _passes(self) -> int:
        """Collectives that a sum over tp counts as."""
        return 1 if self.shape.sequence_parallel else ALL_REDUCE

    def _exposed(self, collective: float, chunks: int, gemm: Gemm, op: Op) -> float:
        """Return the time of a collective that its GEMM does not hide.

        collective: seconds of each chunk, which runs under the GEMM of a neighbour: exposed are one chunk, what the
        others take longer than a GEMM, and what smaller GEMMs take longer than one.
        """
        if chunks == 1:
            return collective
        whole, part = self.gemm(gemm, op), self.gemm(gemm, op, max(1, self.shape.tokens // chunks))
        return collective + (chunks - 1) * max(0.0, collective - part) + max(0.0, chunks * part - whole)


def _recomputed(
    layer: LayerSpec, shape: RankShape, plain: RankShape, clock: _Clock, forward: Mapping[str, float]
) -> dict[str, float]:
    """Return what a backward computes again. plain: the shape without recompute."""
    recompute = shape.recompute
    if recompute.recompute_granularity is None:
        return {}
    if recompute.recompute_granularity == "full":
        return {
            part: seconds
            for part, seconds in forward.items()
            if not (part == "attention" and recompute.recompute_keep_attention)
        }
    again, whole = dict.fromkeys(forward, 0.0), layer_table(layer, plain)
    for operation in whole.operations:
        if not shape.recomputes(*operation.recompute_modules):
            continue
        if operation.attention is not None:
            again["attention"] += clock.attention(operation.attention)
        if operation.gemm is not None:
            again["gemm"] += clock.gemm(operation.gemm)
            again["pointwise"] += clock.casts(Op.F, [operation.gemm])
            messages = clock.gather if operation.gemm.is_column else clock.reduction
            again["tp"] += messages(operation.gemm)
    if shape.recomputes("moe") and layer.experts is not None:  # its messages are those of the backward once more
        again["gemm"] += clock.routed(layer.experts)
        again["pointwise"] += clock.expert_casts(Op.F, layer.experts)
    # core attention's results are already part of its time
    others = tuple(module for module in recompute.recompute_modules if module != "core_attn")
    without = replace(plain, recompute=replace(recompute, recompute_modules=others))
    saved = whole.kept_bytes - layer_table(layer, without).kept_bytes
    again["pointwise"] += POINTWISE_PASSES * saved / clock.hardware.pointwise_bytes_per_second
    return again


@cache
def ring_link(topology: Topology, kind: str, node: Link, network: Link) -> Link:
    """Return the link of one pass of a ring over a kind of group, with the latency of all its hops. Between nodes each
    of its members in a node adds another network card.
    """
    group = topology.group_of(kind, 0)
    if not topology.crosses_nodes(kind):
        return Link(node.bytes_per_second, (len(group) - 1) * node.latency_seconds)
    together = sum(topology.node_of(rank) == topology.node_of(group[0]) for rank in group)
    rate = min(together * network.bytes_per_second, node.bytes_per_second)
    between = -(-len(group) // together) - 1
    latency = between * network.latency_seconds + (len(group) - 1 - between) * node.latency_seconds
    return Link(max(rate, network.bytes_per_second), latency)


@cache
def context_links(topology: Topology, node: Link, network: Link) -> ContextLinks:
    """Return the links of the messages over cp on a grid. A message to another node takes the card of its rank; of an
    exchange only a part goes there.
    """

    def exchange(kind: str) -> Link:
        if not topology.crosses_nodes(kind):
            return node
        ranks = len(topology.group_of(kind, 0))
        share = (ranks - topology.least_on_a_node(kind)) / (ranks - 1)
        return Link(min(network.bytes_per_second / share, node.bytes_per_second), network.latency_seconds)

    ring = "cp" if topology.cp_inner == 1 else "cp_p2p"
    link = network if topology.crosses_nodes(ring) else node
    return ContextLinks(link, exchange("cp"), exchange("cp_a2a"))


def expert_links(plan: RunPlan, hardware: Hardware) -> ExpertLinks | None:
    """Return the links of the messages of experts; None for a model without."""
    if not plan.model.has_experts:
        return None
    return expert_links_of(plan.topology, hardware.node, hardware.network, hardware.stack.pipelined_exchanges)


@cache
def expert_links_of(topology: Topology, node: Link, network: Link, pipelined: bool = False) -> ExpertLinks:
    """Return the links of the messages of experts on a grid."""
    etp = ring_link(topology, "etp", node, network)
    return ExpertLinks(etp, node, network, topology.ep, topology.least_on_a_node("ep"), pipelined)
