# What `ruff`, `mypy` and the tests want, but for peers and clients that nixpkgs has not; `python` imports this checkout.
{ pkgs }:
let
  tests = ps: with ps; [ pytest pytest-xdist hypothesis pyelftools pexpect setuptools build twine ];
in
pkgs.mkShell {
  packages = [
    (pkgs.python3.withPackages (ps: pkgs.tegrad.module.dependencies ++ tests ps))
    pkgs.clang pkgs.gnumake pkgs.mypy pkgs.nix pkgs.ruff pkgs.strace pkgs.systemd
  ];
  CUDA_HOME = pkgs.tegrad.compilers;
  shellHook = ''export PYTHONPATH="$PWD''${PYTHONPATH:+:$PYTHONPATH}"'';
}
