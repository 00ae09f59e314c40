"""A torchx component: `megapipe launch` on every node of any scheduler of torchx.

torchx run -s local_cwd launch/torchx/megapipe_pretrain.py:pretrain --ranks_per_node 2 -- --config quickstart ...
torchx run -s kubernetes -cfg queue=default launch/torchx/megapipe_pretrain.py:pretrain --image megapipe:cuda \
    --num_nodes 2 --ranks_per_node 8 --gpu 8 -- --config llama3_8b ...
"""

import shlex

from torchx import specs

PORT = 29500


def pretrain(
    *arguments: str,
    image: str = "megapipe",
    num_nodes: int = 1,
    ranks_per_node: int = 8,
    cpu: int = 16,
    gpu: int = 0,
    memory_mb: int = 65536,
) -> specs.AppDef:
    """Pretrain with megapipe.

    Args:
        arguments: flags of megapipe pretrain
        image: container image with megapipe
        num_nodes: nodes of the job
        ranks_per_node: ranks that each node starts
        cpu: cores of a node
        gpu: GPUs of a node
        memory_mb: memory of a node in MiB
    """
    # the scheduler fills in the macros; $$ is a $ for the shell, which reads the address of the first node
    first = f"$${{{specs.macros.rank0_env}:=localhost}}"
    words = ["megapipe", "launch", "--nnodes", str(num_nodes), "--nproc-per-node", str(ranks_per_node)]
    line = f"{shlex.join(words)} --node-rank {specs.macros.replica_id} --master-addr {first} --master-port {PORT}"
    trainer = specs.Role(
        name="trainer",
        image=image,
        entrypoint="bash",
        args=["-c", f"exec {line} pretrain {shlex.join(arguments)}"],
        num_replicas=num_nodes,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory_mb),
        port_map={"rendezvous": PORT},
    )
    return specs.AppDef(name="megapipe", roles=[trainer])
