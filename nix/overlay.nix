# `tegrad`, and llama.cpp built for Orin's GPU alone (compute capability 8.7), to compare with.
final: prev: {
  tegrad = final.callPackage ./package.nix { };

  llama-cpp-orin = (prev.llama-cpp.override { cudaSupport = true; }).overrideAttrs (old: {
    cmakeFlags = (old.cmakeFlags or [ ]) ++ [ "-DCMAKE_CUDA_ARCHITECTURES=87" ]; # the last one counts
  });
}
