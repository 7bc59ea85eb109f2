# What the flake and the module come to, as JSON for tests/test_nix.py. `lib` may be nixpkgs' own.
{ lib ? import ./lib.nix }:
let
  flake = (import ../../flake.nix).outputs { self = flake; nixpkgs = ./nixpkgs; };
  pkgs = import ./nixpkgs { system = "aarch64-linux"; config = { }; overlays = [ flake.overlays.default ]; inherit lib; };
  tegrad = pkgs.tegrad.module;
  jetson = flake.packages.aarch64-linux;

  # NixOS' own options, as far as the module sets any.
  nixos = { lib, ... }: let any = lib.mkOption { default = { }; type = lib.types.anything; }; in {
    options = {
      environment = any;
      networking = any;
      systemd = any;
      users = any;
      services.prometheus = any;
      services.udev = any;
    };
  };
  configured = services: (lib.evalModules {
    modules = [ nixos ../../nix/module.nix { config.services.tegrad = services; } ];
    specialArgs = { inherit pkgs; };
  }).config;
  served = configured {
    enable = true;
    settings = { port = 9000; memory = 6; };
    apiKeyFile = "/etc/keys";
    openFirewall = true;
    prometheus = true;
  };
  boosted = configured { performance.enable = true; };
in
{
  systems = builtins.mapAttrs (_: builtins.attrNames) flake.packages;
  shell = map (tool: tool.name) flake.devShells.x86_64-linux.default.packages;
  modules = map toString flake.nixosModules.default.imports;
  package = {
    inherit (tegrad) version pname;
    source = builtins.attrNames (builtins.readDir tegrad.src);
    kernels = builtins.attrNames (builtins.readDir "${tegrad.src}/tegrad/llm/kernels");
    dependencies = map (each: each.pname) tegrad.dependencies;
    optional = builtins.mapAttrs (_: map (each: each.pname)) tegrad.optional-dependencies;
    tinygrad = { inherit (pkgs.tegrad.tinygrad) version src; };
    cuda = tegrad.makeWrapperArgs;
    compilers = map (each: each.name) pkgs.tegrad.compilers.paths;
    program = tegrad.meta.mainProgram;
  };
  llama = { inherit (jetson.llama-cpp-orin) overridden cmakeFlags; };
  off = configured { };
  plain = (configured { enable = true; }).systemd.services.tegrad;
  settings = (configured { enable = true; }).services.tegrad.settings;
  serve = {
    inherit (served.systemd.services) tegrad;
    inherit (served.services) prometheus;
    udev = served.services.udev.extraRules;
    user = served.users.users.tegrad;
    ports = served.networking.firewall.allowedTCPPorts;
    file = served.services.tegrad.settings;
  };
  performance = boosted.systemd.services;
}
