#!/bin/sh
# The CPU's kernels on aarch64, under qemu's emulation: first the tokens of the built-in model beside this machine's,
# then the kernels' tests.  Nothing of the machine but the package qemu-user-static is changed.
#
#     tests/aarch64/run.sh [FOLDER]       from the repository's root; FOLDER keeps what is downloaded
#
# Needs Debian on x86-64, root for apt-get, pip and this package in `python`, 4 GB of disk, and hours: an instruction
# takes some twenty times as long.  What torch's wheels for aarch64 link from 2.11 on is CUDA, so torch is 2.10.
# Emulation shows that instructions are right; not how fast they are, and not what a processor that reorders memory
# accesses would do, for the emulating one does so less.
set -eu
folder=$(mkdir -p "${1:-build/aarch64}" && cd "${1:-build/aarch64}" && pwd)
root=$folder/root site=$folder/site
export APT_CONFIG="$folder/apt.conf"

if [ ! -e "$root/usr/bin/python3" ]; then
    command -v qemu-aarch64-static > /dev/null ||
        env -u APT_CONFIG apt-get install -y --no-install-recommends qemu-user-static
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/state" "$root"
    : > "$folder/status"
    cat > "$APT_CONFIG" <<END
Dir::State "$folder/state";
Dir::State::lists "$folder/lists";
Dir::State::status "$folder/status";
Dir::Cache "$folder/cache";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
END
    apt-get update
    apt-get install -y --no-install-recommends --download-only python3 libstdc++6 libgomp1
    for package in "$folder"/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
fi
version=$(basename "$(readlink "$root/usr/bin/python3")" | sed 's/python3\./3/')
if [ ! -e "$site/torch" ]; then
    pip() {
        python -m pip install -q --target "$site" --only-binary=:all: --implementation cp --python-version "$version" \
            --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
            --platform manylinux2014_aarch64 "$@"
    }
    pip --no-deps torch==2.10.0
    pip numpy numba safetensors tokenizers jinja2 msgspec tqdm huggingface_hub filelock sympy networkx fsspec typing-extensions \
        pytest pytest-timeout pytest-xdist hypothesis
fi
unset APT_CONFIG

emulated() {  # CORES, then the arguments of Python; on one core no compile worker is started: it could not be
    cores=$1
    shift
    NUMBA_CACHE_DIR=$folder/kernels XDG_CACHE_HOME=$folder/user taskset -c "$cores" qemu-aarch64-static -L "$root" \
        -E PYTHONPATH="$site:$PWD/src" -E LD_LIBRARY_PATH="$site/torch/lib" "$root/usr/bin/python3" "$@"
}

python tests/aarch64/tokens.py > "$folder/tokens-here"
# Weights in int4 are calibrated by computing, which may round differently there: take those that were kept here.
mkdir -p -m 700 "$folder/user/slotwise"
cp -rp "${XDG_CACHE_HOME:-$HOME/.cache}/slotwise/packed-weights" "$folder/user/slotwise/"
emulated 0 tests/aarch64/tokens.py > "$folder/tokens-there"
cmp "$folder/tokens-here" "$folder/tokens-there"
emulated 0,1 -m pytest -q -n 0 -p no:cacheprovider --timeout 3600 tests/compute/kernels/test_quantize.py \
    tests/compute/kernels/test_cpu_attention.py tests/compute/kernels/test_int8_cache.py \
    tests/compute/kernels/test_cpu_tokens.py --deselect tests/compute/kernels/test_cpu_tokens.py::test_what_a_product_takes_is_measured  # a time
