// Activation functions of a feed-forward layer. ACTIVATION: 0 none, 1 SiLU, 2 GELU in its tanh form; 3 caps: CAP *
// tanh(v / CAP); 4 squares what is above zero.
#pragma once

static __device__ __forceinline__ float activate(float v) {
    if constexpr (ACTIVATION == 1) return v / (1.0f + __expf(-v));
    if constexpr (ACTIVATION == 2) {
        // v * (1 + tanh(u)) / 2 = v / (1 + exp(-2u))
        return v / (1.0f + __expf(-2 * 0.7978845608028654f * (v + 0.044715f * v * v * v)));
    }
#ifdef CAP
    if constexpr (ACTIVATION == 3) return CAP * tanhf(v * (1 / CAP));
#endif
    if constexpr (ACTIVATION == 4) return v > 0 ? v * v : 0;
    return v;
}
