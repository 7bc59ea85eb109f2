# services.tegrad: `tegrad serve` as the hardened service of packaging/tegrad.service, with the GPU's nodes for the group video,
# the fastest power mode, and its metrics for Prometheus (docs/nixos.md).
{ config, lib, pkgs, ... }:
let
  inherit (lib) mkEnableOption mkIf mkMerge mkOption types;
  cfg = config.services.tegrad;
  unit = import ./unit.nix { inherit lib; };
  server = unit ../packaging/tegrad.service;
  performance = unit ../packaging/tegrad-performance.service;
  keyed = lib.optionalAttrs (cfg.apiKeyFile != null);
  settings = cfg.settings // keyed { api-key-file = "/run/credentials/tegrad.service/keys"; };
in
{
  options.services.tegrad = {
    enable = mkEnableOption "tegrad serve, language models over HTTP";
    package = mkOption {
      type = types.package;
      default = pkgs.tegrad;
      defaultText = "pkgs.tegrad";
      description = "The environment that has `tegrad`; `pkgs.tegrad.override { extras = [ ... ]; }` makes others.";
    };
    settings = mkOption {
      type = types.attrsOf types.anything;
      default = { };
      example = { models = [ "bartowski/Llama-3.2-1B-Instruct-GGUF" ]; memory = 6; };
      description = "The server's options, as in its TOML file (docs/serve.md).";
    };
    apiKeyFile = mkOption {
      type = types.nullOr types.str;
      default = null;
      description = "A file of keys, one a line, that only root needs to be able to read.";
    };
    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Let other machines reach the port. The server listens on 127.0.0.1 unless `settings.host` says otherwise.";
    };
    prometheus = mkOption {
      type = types.bool;
      default = false;
      description = "Have this machine's Prometheus read the server's /metrics.";
    };
    performance = {
      enable = mkEnableOption "the fastest power mode and clocks, and what was before when the unit stops";
      packages = mkOption {
        type = types.listOf types.package;
        default = [ pkgs.nvidia-jetpack.l4t-nvpmodel pkgs.nvidia-jetpack.l4t-tools ];
        defaultText = "those of jetpack-nixos";
        description = "What has `nvpmodel` and `jetson_clocks`.";
      };
    };
  };

  config = mkMerge [
    (mkIf cfg.enable {
      services.tegrad.settings = { host = lib.mkDefault "127.0.0.1"; port = lib.mkDefault 8080; };
      services.udev.extraRules = builtins.readFile ../packaging/70-tegrad.rules;
      environment.systemPackages = [ cfg.package ];
      users.users.tegrad = { isSystemUser = true; group = "tegrad"; home = "/var/lib/tegrad"; };
      users.groups.tegrad = { };
      systemd.services.tegrad = {
        description = "tegrad: language models over HTTP";
        wantedBy = [ "multi-user.target" ];
        inherit (server) unitConfig;
        serviceConfig = server.serviceConfig // {
          ExecStart = "${cfg.package}/bin/tegrad serve --config ${(pkgs.formats.toml { }).generate "serve.toml" settings}";
        } // keyed { LoadCredential = "keys:${cfg.apiKeyFile}"; };
      };
      networking.firewall.allowedTCPPorts = lib.optional cfg.openFirewall cfg.settings.port;
    })
    (mkIf (cfg.enable && cfg.prometheus) {
      services.prometheus.scrapeConfigs = [
        { job_name = "tegrad"; static_configs = [ { targets = [ "127.0.0.1:${toString cfg.settings.port}" ]; } ]; }
      ];
    })
    (mkIf cfg.performance.enable {
      systemd.services.tegrad-performance = {
        description = "tegrad: the Jetson's fastest power mode and clocks";
        wantedBy = [ "multi-user.target" ];
        path = cfg.performance.packages;
        inherit (performance) unitConfig;
        serviceConfig = performance.serviceConfig // {
          ExecStart = "${../packaging/tegrad-performance} start";
          ExecStop = "${../packaging/tegrad-performance} stop";
        };
      };
    })
  ];
}
