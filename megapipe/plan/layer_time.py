"""Seconds of one transformer layer and of the head, for one microbatch on one rank: GEMMs by their shapes, attention,
what moves memory, tensor-parallel messages with what hides them, and the all-to-alls of experts. Products and
tensor-parallel messages are those of the layer's trace.

A GEMM reaches a share of the peak by its depth and the waves of its tiles (`Hardware.gemm_share`); everything else
moves memory at a share of its rate. With fp8 the GEMMs of a layer's linears have the peak of fp8, and casts move
memory; attention and the head do not change. The experts of a rank are taken to get equally many rows, which every one
of them multiplies on its own; those of the fullest rank get `LayerSpec.imbalance` times the mean, and the others
wait for it.

Also the links that a plan's groups of ranks communicate over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megapipe.config.model import NORMALIZATIONS
from megapipe.dtypes import FP8
from megapipe.layers.linear import casts
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.layers.table import ALL_REDUCE, Documents, RankShape, ring_bytes, total_bytes
from megapipe.plan.attention_rates import FUSED_BACKWARD
from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import (
    CONTEXT_GROUPS,
    EXPERT_GROUPS,
    group_size,
    head_trace,
    layer_trace,
    messages_over_tp,
    sent_bytes,
    without_recompute,
)
from megapipe.schedule.action import Op
from megapipe.topology import Topology
from megapipe.trace.traced import CORE_ATTENTION, OUTPUT_LAYER, STAGE, AttentionWork, Message, Product

# each byte a layer keeps is written once and read once in the forward; a backward moves twice as much
POINTWISE_PASSES = 2.0
SECOND_OF_EXPERTS = "mlp.experts.weight2"  # the name of their second products
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

    def seconds(self, group: str, num_bytes: float, ranks: int) -> float:
        """Return the seconds of an exchange of num_bytes a rank, its own part included, over a kind of group."""
        if group == "ep":
            return self.exchange(num_bytes)
        link = {"ep_nodes": self.network, "ep_places": self.node, "etp": self.etp}[group]
        return ring_bytes(num_bytes, ranks) / link.bytes_per_second + link.latency_seconds


def expert_message_seconds(messages: Iterable[Message], shape: RankShape, links: ExpertLinks) -> float:
    """Return the seconds of such messages of experts: rows with their weights to the ranks of their experts, and back,
    and in a forward, before that, their numbers, which the router's choice gives.

    If a token goes once to a node, rows travel between nodes and then within one, each at its link's rate.
    """
    took: dict[str, float] = defaultdict(float)  # of rows, by group
    numbers = 0.0
    for each in messages:
        if each.group in EXPERT_GROUPS:
            seconds = each.times * links.seconds(each.group, each.num_bytes / each.times, group_size(shape, each.group))
            if each.name == "router":
                numbers += seconds
            else:
                took[each.group] += seconds
    both = [took.pop("ep_nodes", 0.0), took.pop("ep_places", 0.0)]
    return numbers + (max(both) if links.pipelined else sum(both)) + sum(took.values())


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
    clock = _Clock(shape, hardware, tp_link)
    plain = replace(without_recompute(shape), documents=Documents())
    whole, of_frozen = (layer_trace(each, plain, has_levels=False) for each in (layer.unfrozen, layer))
    linears = clock.linears(whole.products, messages_over_tp(whole, plain))
    in_w = clock.linears(of_frozen.products, messages_over_tp(of_frozen, plain)).weights
    attention, core_backward = clock.attention(whole.attention), clock.attention(whole.attention, is_backward=True)
    pointwise = POINTWISE_PASSES * _pointwise_kept(layer, plain) / hardware.pointwise_bytes_per_second
    biases = clock.biases(layer, whole.products)
    forward = {"gemm": 0.0, "attention": attention, "pointwise": pointwise + biases / 3, "tp": 0.0}
    inputs = {"gemm": 0.0, "attention": core_backward, "pointwise": 2.0 * pointwise + biases * 2 / 3, "tp": 0.0}

    def exchanged(messages: Iterable[Message], computed: float) -> dict[str, float]:
        """Return the seconds of messages over cp and of those of experts. computed: seconds of attention meanwhile."""
        found, listed = dict[str, float](), list(messages)
        if shape.cp > 1 and layer.config.has_attention:
            links = contexts or ContextLinks(tp_link, tp_link, tp_link)
            found["cp"] = _context_seconds(listed, shape, links, computed)
        if experts is not None and layer.num_experts:
            found["ep"] = expert_message_seconds(listed, shape, experts)
        return found

    forward |= exchanged((each for each in whole.messages if each.op is Op.F), attention)
    inputs |= exchanged((each for each in whole.messages if each.op is Op.I), core_backward)
    seconds = OpSeconds(forward, inputs, {}) + replace(linears, weights=in_w)
    again = _recomputed(layer, shape, plain, clock, seconds.forward)
    if again:
        traced = layer_trace(layer, replace(shape, documents=Documents()), has_levels=False)
        again |= exchanged((each for each in traced.messages if each.again), again.get("attention", 0.0))
    return (seconds + OpSeconds({}, again, {})).with_overhead(hardware.stack.overhead)


def _pointwise_kept(layer: LayerSpec, shape: RankShape) -> int:
    """Return what a layer keeps for its backward, but for what core attention moves in its own time: matrices of
    queries and keys, and copies of a fused kernel's output.
    """
    traced = layer_trace(layer.unfrozen, shape, has_levels=False)
    of_core = [tensor for tensor in traced.kept if tensor.name == CORE_ATTENTION]
    others = traced.kept_bytes - total_bytes(of_core)
    written = [work for work in traced.attention if work.op is Op.F and not work.kernel]
    for work in written:
        of_core = [tensor for tensor in of_core if 4 * work.head_size * tensor.elements < work.flops]
    exchanges = any(each.operation == "all_to_all" and each.name == CORE_ATTENTION for each in traced.messages)
    return others + total_bytes(of_core if written or exchanges else set(of_core))


def _context_seconds(messages: Iterable[Message], shape: RankShape, links: ContextLinks, computed: float) -> float:
    """Return what such messages over cp add to attention: those that go around a ring run under it, the others do not.

    computed: seconds of attention meanwhile.
    """
    sent: dict[tuple[bool, Link], float] = defaultdict(float)
    for each in messages:
        if each.group in CONTEXT_GROUPS:
            exchanges = links.inner if each.group == "cp_a2a" else links.exchange
            link = exchanges if each.operation == "all_to_all" else links.ring
            sent[each.operation == "shift", link] += sent_bytes(each, shape)
    took = {False: 0.0, True: 0.0}
    for (is_under, link), num_bytes in sent.items():
        took[is_under] += num_bytes / link.bytes_per_second + link.latency_seconds
    return took[False] + max(0.0, took[True] - computed)


def head_seconds(model: ModelSpec, shape: RankShape, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """Return the seconds of final norm, output layer and loss, and of multi-token prediction without its layers."""
    clock, traced = _Clock(shape, hardware, tp_link), head_trace(model, shape, has_levels=False)
    rate = hardware.pointwise_bytes_per_second
    messages = messages_over_tp(traced, shape)

    def linears(*ends: str, times: int = 1) -> OpSeconds:
        products = (each for each in traced.products if each.name.endswith(ends))
        return clock.linears(products, [each for each in messages if each.name.endswith(ends)], times)

    config = model.config
    logits = shape.tokens * (config.padded_vocab_size // shape.tp) * shape.wide
    again = 0 if shape.loss_chunk is None else 1  # logits in chunks are computed once more in a backward
    times = 1 + len(model.predictions)
    passes = {"pointwise": 3 * logits / rate}, {"pointwise": (2 + again) * logits / rate}
    found = linears(OUTPUT_LAYER, STAGE, times=times) + OpSeconds(*passes, {}) * times
    if model.predictions:
        # the embedding of the next tokens, the norms and the input of eh_proj
        statistics = 2 * NORMALIZATIONS[config.normalization].statistics * shape.own_tokens * shape.wide
        moved = POINTWISE_PASSES * (3 * shape.hidden_bytes(config.hidden_size) + statistics) / rate
        found += OpSeconds({"pointwise": moved}, {"pointwise": 2.0 * moved}, {}) * len(model.predictions)
        found += linears("eh_proj", "embedding")
    return found.with_overhead(hardware.stack.overhead)


@dataclass(frozen=True)
class _Clock:
    """Seconds of single operations of a shape on some hardware."""

    shape: RankShape
    hardware: Hardware
    link: Link

    def linears(self, products: Iterable[Product], messages: Iterable[Message], times: int = 1) -> OpSeconds:
        """Return the seconds of linears: products, casts to fp8, and messages over tp with what hides them.

        times: how often each linear is used, together with its messages.
        """
        parts = {op: dict.fromkeys(("gemm", "pointwise", "tp"), 0.0) for op in (Op.F, Op.I, Op.W)}
        of_linear: dict[tuple[str, Op], Product] = {}
        for product in (each._replace(tokens=each.tokens // times) for each in products if not each.again):
            of_linear[product.name, product.op] = product
            parts[product.op]["gemm"] += self.product(product)
            parts[product.op]["pointwise"] += self.cast(product)
        sent, gathered = Counter[tuple[str, Op, bool]](), set[str]()
        for name, op, again, _, operation, _, num_bytes in messages:
            is_gather = operation == "all_gather"
            gathered |= {name} if is_gather and op is Op.F else set()
            # in a whole backward the input of a column-parallel linear is gathered for the weight gradient
            is_of_w = is_gather and op is Op.I and (name in gathered or (name, op) not in of_linear)
            if not again:
                sent[name, Op.W if is_of_w else op, is_gather] += num_bytes // times
        hidden = 0.0
        for (name, op, is_gather), num_bytes in sent.items():
            near = of_linear.get((name, op)) if op is not Op.W else None  # W has no chunks
            parts[op]["tp"] += self.exposed(num_bytes, is_gather, near)
            if op is Op.I and near is not None and not is_gather:
                # In B the second gather runs under the GEMM of the input gradient, which is then reduced, whole, under
                # that of the weights, where I alone may cut the reduction into chunks
                reduction, of_weights = self.exposed(num_bytes, is_gather), of_linear.get((name, Op.W))
                if again_gathered := sent.get((name, Op.W, True)):
                    hidden += min(self.exposed(again_gathered, True), self.product(near))
                hidden += 0.0 if of_weights is None else min(reduction, self.product(of_weights))
                hidden -= reduction - self.exposed(num_bytes, is_gather, near)
        return OpSeconds(parts[Op.F], parts[Op.I], parts[Op.W], hidden) * times

    def product(self, product: Product, tokens: int | None = None) -> float:
        """Return the seconds of a product: by its FLOPs or by what it moves, whichever takes longer.

        tokens: of each of its matrices, if not the product's.
        """
        tokens, hardware = tokens or max(1, product.tokens // product.matrices), self.hardware
        rows, columns, depth = tokens, product.outputs, product.inputs
        if product.op is Op.W:
            rows, columns, depth = product.outputs, product.inputs, tokens
        dtype, operand = (FP8, 1.0) if product.is_fp8 else (self.shape.dtype, 2.0)
        reached = hardware.peak(dtype) * hardware.gemm_share(rows, columns, depth, product.is_fp8)
        moved = operand * depth * (rows + columns) + 2.0 * rows * columns
        each = max(2.0 * rows * columns * depth / reached, moved / hardware.memory_bytes_per_second)
        return product.matrices * each

    def cast(self, product: Product) -> float:
        """Return the seconds of the casts to fp8 for a product."""
        if not product.is_fp8:
            return 0.0
        cast, first, weights = casts(self.shape), product.tokens * product.inputs, product.num_weights
        moved = {
            Op.F: cast.inputs * first + cast.weight * weights,
            Op.I: cast.gradients * first,
            Op.W: cast.inputs_again * product.tokens * product.outputs
            + cast.gradients_again * first
            + cast.weight_gradient * weights,
        }[product.op]
        return moved / self.hardware.pointwise_bytes_per_second

    def biases(self, layer: LayerSpec, products: Iterable[Product]) -> float:
        """Return the seconds that a stack's kernels for the biases of experts take, forward and backward."""
        rows = sum(each.tokens for each in products if each.op is Op.F and each.name == SECOND_OF_EXPERTS)
        elements = layer.config.add_bias_linear * rows * layer.config.hidden_size
        return self.hardware.stack.bias_bytes * elements / self.hardware.pointwise_bytes_per_second

    def attention(self, works: Iterable[AttentionWork], is_backward: bool = False) -> float:
        """Return the seconds of core attention's forward, or of its backward."""
        hardware, seconds = self.hardware, 0.0
        for work in works:
            if work.op is (Op.I if is_backward and not work.kernel else Op.F):
                reached = hardware.peak(self.shape.dtype) * hardware.attention_share_of(work, is_backward)
                moved = hardware.stack.softmax_shares[is_backward] * work.moved_bytes
                times = FUSED_BACKWARD if is_backward and work.kernel else 1.0
                seconds += times * work.flops / reached + moved / hardware.pointwise_bytes_per_second
        return seconds

    def exposed(self, num_bytes: int, is_gather: bool, near: Product | None = None) -> float:
        """Return the seconds of a gather, or of a sum, of so many bytes over tp that its GEMM does not hide.

        near: the GEMM, if the message is cut into chunks, each of which runs under the GEMM of a neighbour: exposed are
        one chunk, what the others take longer than a GEMM, and what smaller GEMMs take longer than one.
        """
        shape, link = self.shape, self.link
        chunks = 1 if near is None else shape.chunks.gather if is_gather else shape.chunks.reduce
        passes = 1 if is_gather or shape.sequence_parallel else ALL_REDUCE
        seconds = ring_bytes(num_bytes, shape.tp) / chunks / link.bytes_per_second + link.latency_seconds
        message = passes * self.hardware.stack.message_times * seconds
        if near is None or chunks == 1:
            return message
        whole, part = self.product(near), self.product(near, max(1, shape.tokens // chunks))
        return message + (chunks - 1) * max(0.0, message - part) + max(0.0, chunks * part - whole)


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
    traced = layer_trace(layer, replace(shape, documents=Documents()), has_levels=False)
    products = (each._replace(again=False) for each in traced.products if each.again)
    messages = (each._replace(again=False, op=Op.F) for each in messages_over_tp(traced, shape) if each.again)
    again = {**dict.fromkeys(forward, 0.0), **clock.linears(products, messages).forward}
    if shape.recomputes("core_attn"):
        again["attention"] = clock.attention(each for each in traced.attention if each.again)
    # core attention's results are already part of its time
    timed = ("core_attn",) if layer.config.has_attention else ()
    others = tuple(module for module in recompute.recompute_modules if module not in timed)
    without = replace(plain, recompute=replace(recompute, recompute_modules=others))
    kept, fewer = (layer_trace(layer, each, has_levels=False).kept_bytes for each in (plain, without))
    saved = kept - fewer
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
