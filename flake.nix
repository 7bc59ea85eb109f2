{
  description = "tegrad: tinygrad's NV backend on Jetson Orin and Hopper, GGUF language models on it, and an emulated Orin";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs = { self, nixpkgs }:
    let
      # NVIDIA's compilers are not free software; a Jetson's GPU is 8.7, Hopper's 9.0.
      capabilities = { aarch64-linux = [ "8.7" ]; x86_64-linux = [ "9.0" ]; };
      pkgsOf = system: cudaCapabilities: import nixpkgs {
        inherit system;
        config = { allowUnfree = true; inherit cudaCapabilities; };
        overlays = [ self.overlays.default ];
      };
      forEach = make: builtins.mapAttrs (system: found: make (pkgsOf system found)) capabilities;
    in
    {
      overlays.default = import ./nix/overlay.nix;
      nixosModules.default = { imports = [ ./nix/module.nix ]; nixpkgs.overlays = [ self.overlays.default ]; };
      packages = forEach (pkgs: { default = pkgs.tegrad; inherit (pkgs) tegrad llama-cpp-orin; });
      devShells = forEach (pkgs: { default = import ./nix/shell.nix { inherit pkgs; }; });
    };
}
