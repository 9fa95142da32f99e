#!/bin/bash
# bind.sh COMMAND …: runs COMMAND as one rank of a node, bound to the cores and the network card nearest to the rank's GPU.
# Needs a launcher that numbers the ranks of a node, nvidia-smi, taskset and /sys. With BIND_SHOW=yes, each rank prints its
# binding. summa3d assigns GPUs to ranks by the same rule as this script.
set -euo pipefail

stop() {
    echo "bind.sh on $(uname -n): $*" >&2
    exit 1
}

# A command that holds TERM back until it hears it is asked to end while this script looks around, too.
if [[ ${1:-} == env && ${2:-} == --block-signal=TERM && ! ${BIND_HELD:-} ]]; then
    BIND_HELD=yes exec env --block-signal=TERM "$BASH" "$0" "$@"
fi

sys=${BIND_SYS:-/sys} # tests replace the machine's own tree
export CUDA_DEVICE_ORDER=PCI_BUS_ID # CUDA then numbers GPUs as nvidia-smi does, and not by speed

# The variables of an MPI's own launcher come first: under it, SLURM_LOCALID is inherited from the batch step and always 0.
rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${MV2_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-}}}}
[[ $rank ]] || stop "no rank in the node: none of OMPI_COMM_WORLD_LOCAL_RANK, MV2_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID," \
    "SLURM_LOCALID is set. Start it with srun or the MPI's launcher."

# All GPUs stay visible, because ranks read each other's memory. summa3d takes GPU number (rank in the node) mod (visible GPUs).
if [[ ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
else
    listing=$(nvidia-smi --query-gpu=index --format=csv,noheader) || stop "nvidia-smi lists no GPU: $listing"
    mapfile -t devices <<<"$listing"
fi
device=${devices[rank % ${#devices[@]}]}
bus=$(nvidia-smi --id="$device" --query-gpu=pci.bus_id --format=csv,noheader) || stop "nvidia-smi knows no GPU $device: $bus"
bus=${bus,,}
place=$sys/bus/pci/devices/${bus: -12} # nvidia-smi writes a PCI domain in 8 digits, the kernel in 4
[[ -r $place/local_cpulist && -r $place/numa_node ]] || stop "$place does not say which cores are near GPU $device"
cores=$(<"$place/local_cpulist")
node=$(<"$place/numa_node")

# UCX uses the InfiniBand ports in UCX_NET_DEVICES; NCCL selects its ports by the same distances. A value that is set stays.
if [[ ! ${UCX_NET_DEVICES:-} && $node -ge 0 ]]; then
    near=()
    for card in "$sys"/class/infiniband/*; do
        [[ -r $card/device/numa_node && -r $card/ports/1/state && -r $card/ports/1/link_layer ]] || continue
        if [[ $(<"$card/device/numa_node") == "$node" && $(<"$card/ports/1/state") == *ACTIVE* &&
            $(<"$card/ports/1/link_layer") == InfiniBand ]]; then
            near+=("${card##*/}:1")
        fi
    done
    if ((${#near[@]})); then
        UCX_NET_DEVICES=$(IFS=, && echo "${near[*]}")
        export UCX_NET_DEVICES
    fi
fi

if [[ ${BIND_SHOW:-} == yes ]]; then
    echo "$(uname -n) rank $rank: GPU $device at $bus, cores $cores, network ${UCX_NET_DEVICES:-as UCX chooses}"
fi
exec taskset --cpu-list "$cores" "$@"
