# tegrad with its dependencies and NVIDIA's compilers: an environment with the programs `tegrad` and `python3`.
#
# An environment and no lone program, since tegrad starts processes of the Python that runs it (an engine, a board).
{ lib
, stdenv
, python3
, symlinkJoin
, cudaPackages
, extras ? [ "board" "chat" "grammar" "hub" "serve" ]
}:
let
  py = python3.pkgs;

  # The release that tegrad is made for, and no other.
  tinygrad = py.buildPythonPackage rec {
    pname = "tinygrad";
    version = "0.14.0";
    format = "wheel";
    src = py.fetchPypi {
      inherit pname version format;
      dist = "py3";
      python = "py3";
      hash = "sha256-0qW+ozxjf98QWWNjIymHaz0yU9OClawf/S/4FkbZO+M=";
    };
    # It looks for libc in /lib and /usr/lib.
    postInstall = ''
      substituteInPlace $out/${python3.sitePackages}/tinygrad/runtime/autogen/libc.py \
        --replace-fail "c.DLL('libc', 'c'," "c.DLL('libc', '${lib.getLib stdenv.cc.libc}/lib/libc.so.6',"
    '';
    pythonImportsCheck = [ "tinygrad" ];
  };

  # In one folder, as a toolkit has them: libraries, headers, ptxas (tegrad/nv/toolchain.py).
  outputsOf = package: map (output: package.${output}) package.outputs;
  compilers = symlinkJoin {
    name = "tegrad-compilers";
    paths = lib.concatMap outputsOf (
      [ cudaPackages.cuda_nvrtc cudaPackages.libnvjitlink cudaPackages.cuda_nvcc cudaPackages.cuda_cudart ]
      ++ lib.optional (cudaPackages ? cuda_crt) cudaPackages.cuda_crt # CUDA 13 has headers of nvcc's there
    );
  };

  lines = lib.splitString "\n" (builtins.readFile ../tegrad/__init__.py);
  versions = lib.filter (found: found != null) (map (builtins.match "__version__ = \"(.*)\"") lines);

  files = [ "CHANGELOG.md" "LICENSE" "MANIFEST.in" "README.md" "pyproject.toml" "setup.py" "tegrad" "tegrad.pth" ];

  module = py.buildPythonPackage {
    pname = "tegrad";
    version = lib.head (lib.head versions);
    pyproject = true;
    src = builtins.path {
      name = "tegrad-source";
      path = ../.;
      filter = path: type:
        let name = lib.removePrefix (toString ../. + "/") (toString path); in
        (lib.elem name files || lib.hasPrefix "tegrad/" name) && baseNameOf name != "__pycache__";
    };
    build-system = [ py.setuptools ];
    dependencies = [ tinygrad py.numpy py.gguf py.tokenizers py.jinja2 py.typer ]
      ++ lib.concatMap (extra: optional.${extra}) extras;
    optional-dependencies = optional;
    makeWrapperArgs = [ "--set-default" "CUDA_HOME" "${compilers}" ];
    pythonImportsCheck = [ "tegrad" ];
    doCheck = false; # the tests want emulated boards, ports and minutes
    meta = {
      description = "tinygrad's NV backend on Jetson Orin and Hopper, GGUF language models on it, and an emulated Orin";
      license = lib.licenses.mit;
      platforms = [ "aarch64-linux" "x86_64-linux" ];
      mainProgram = "tegrad";
    };
  };

  optional = {
    board = [ py.llvmlite ];
    chat = [ py.rich py.prompt-toolkit py.llguidance ];
    grammar = [ py.llguidance ];
    hub = [ py.huggingface-hub ];
    serve = [ py.starlette py.uvicorn py.llguidance py.prometheus-client ];
  };
in
(python3.withPackages (_: [ module ])).overrideAttrs (old: {
  name = "tegrad-${module.version}";
  passthru = (old.passthru or { }) // { inherit compilers module tinygrad; };
  meta = (old.meta or { }) // module.meta;
})
