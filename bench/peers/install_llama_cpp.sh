#!/usr/bin/env bash
# Build llama.cpp's own server and quantizer for this machine: bench/out/peers/llama.cpp/bin. Does nothing when that
# was done already. The sources are the ones that the source package of llama-cpp-python carries; its Python part is
# not used. Takes about ten minutes on two cores. Usage: bench/peers/install_llama_cpp.sh [avx2]
# With avx2 it is built for AVX2, FMA and F16C only, into bench/out/peers/llama.cpp-avx2: what a processor without
# AVX-512 runs, on one that has it.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.3.36
isa=${1:-native}
case $isa in
    native) name=llama.cpp flags=(-DGGML_NATIVE=ON) ;;
    avx2) name=llama.cpp-avx2
        flags=(-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON) ;;
    *) echo "usage: $0 [avx2]" >&2; exit 1 ;;
esac
root=$(mkdir -p bench/out/peers && cd -P bench/out/peers && pwd)/$name
stamp=$root/.installed-$version
if [ -e "$stamp" ]; then exit 0; fi
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

for tool in cmake c++ make; do
    command -v "$tool" >/dev/null || { say "llama.cpp is built from source: please install cmake, make and g++"; exit 1; }
done
say "building llama.cpp (from llama-cpp-python $version) into $root (about ten minutes)"
# An interrupted build goes on where it was.
if [ ! -e "$root/source/.unpacked-$version" ]; then
    rm -rf "$root" && mkdir -p "$root/source"
    python=${PYTHON:-${VENV:-.venv}/bin/python}
    "$python" -m pip download --disable-pip-version-check --quiet --no-deps --no-binary :all: \
        -d "$root" "llama-cpp-python==$version"
    tar xzf "$root/llama_cpp_python-$version.tar.gz" -C "$root/source" --strip-components=1
    touch "$root/source/.unpacked-$version"
fi
# GGML_NATIVE: every instruction set that this processor has. No web page, TLS or tests: none of them is measured.
cmake -S "$root/source/vendor/llama.cpp" -B "$root/build" -DCMAKE_BUILD_TYPE=Release "${flags[@]}" \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF >"$root/build.log"
cmake --build "$root/build" --parallel "${JOBS:-$(nproc)}" --target llama-server llama-quantize llama-batched-bench \
    >>"$root/build.log" 2>&1 || { tail -20 "$root/build.log" >&2; exit 1; }
mkdir -p "$root/bin"
grep -om1 'ggml-org/llama.cpp@[0-9a-f]*' "$root/source/CHANGELOG.md" >"$root/bin/commit"
cp "$root/build/bin/"{llama-server,llama-quantize,llama-batched-bench} "$root/bin/"
# What `bench.engine.kernels ggml` is built with.
mkdir -p "$root/lib"
cp "$root/build/ggml/src/"libggml{,-cpu,-base}.a "$root/lib/"
cp -r "$root/source/vendor/llama.cpp/ggml/include" "$root/"
rm -rf "$root/build" "$root/source" "$root/llama_cpp_python-$version.tar.gz"
touch "$stamp"
say "llama.cpp is in $root/bin"
