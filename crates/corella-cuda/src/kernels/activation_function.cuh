// The activation function of a feed-forward layer, chosen by the macro ACTIVATION.
#pragma once
#include "prelude.cuh"

// ACTIVATION is one of these.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define GELU_SIGMOID 3

#if ACTIVATION != GELU
DEVICE float sigmoid(float x) {
    const float LOG2_E = 1.4426950408889634f;
    return 1.0f / (1.0f + exp2_fast(-x * LOG2_E));
}
#endif

DEVICE float activate(float x) {
#if ACTIVATION == SILU
    return x * sigmoid(x);
#elif ACTIVATION == GELU
    const float SQRT_HALF = 0.70710678118654752f;
    return 0.5f * x * (1.0f + erff(x * SQRT_HALF));
#elif ACTIVATION == GELU_SIGMOID
    return x * sigmoid(1.702f * x);
#else
    // x * (1 + tanh(u)) / 2 is x times the sigmoid of 2 u.
    const float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
    return x * sigmoid(TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x));
#endif
}
