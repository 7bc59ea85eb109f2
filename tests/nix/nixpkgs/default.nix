# Stands for nixpkgs: packages that remember what they were made of.
{ system, config, overlays ? [ ], lib ? import ../lib.nix }:
let
  # One with several outputs, for `lib.getLib` and the compilers.
  package = name: attributes: let self = attributes // (attributes.passthru or { }) // {
    inherit name;
    type = "derivation";
    outPath = "/stub/${name}";
    outputs = [ "out" "lib" ];
    out = self;
    lib = self;
    override = arguments: package name (attributes // { overridden = arguments; });
    overrideAttrs = change: package name (attributes // change self);
  }; in self;
  named = names: builtins.listToAttrs (map (name: { inherit name; value = package name { pname = name; }; }) names);
  python = named [
    "numpy" "gguf" "tokenizers" "jinja2" "typer" "llvmlite" "rich" "prompt-toolkit" "llguidance" "huggingface-hub"
    "starlette" "uvicorn" "prometheus-client" "setuptools" "pytest" "pytest-xdist" "hypothesis" "pyelftools" "pexpect" "build" "twine"
  ] // {
    buildPythonPackage = attributes: package "${attributes.pname}-${attributes.version}" attributes;
    fetchPypi = attributes: attributes;
  };
  base = named [ "symlinkJoin" "clang" "gnumake" "mypy" "nix" "ruff" "strace" "systemd" "llama-cpp" ] // {
    inherit lib system config;
    stdenv.cc.libc = package "glibc" { };
    python3 = {
      pkgs = python;
      sitePackages = "lib/python3.13/site-packages";
      withPackages = choose: package "python-env" { paths = choose python; };
    };
    symlinkJoin = { name, paths }: package name { inherit paths; };
    cudaPackages = named [ "cuda_nvrtc" "libnvjitlink" "cuda_nvcc" "cuda_cudart" ];
    mkShell = attributes: attributes;
    nvidia-jetpack = named [ "l4t-nvpmodel" "l4t-tools" ];
    formats.toml = { }: { generate = name: value: package name { inherit value; }; };
    callPackage = file: arguments:
      let function = import file; in function (builtins.intersectAttrs (builtins.functionArgs function) final // arguments);
  };
  final = builtins.foldl' (before: overlay: before // overlay final before) base overlays;
in
final
