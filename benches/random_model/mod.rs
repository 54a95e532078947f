//! A decoder of any shape with random weights, drawn on the device that will run it.

use burn::tensor::{DType, Device, Distribution, Tensor};
use weact::core::{
    Backbone,
    io::checkpoint::dims,
    lora::Projection,
    model::{
        Config,
        block::{Block, Linear},
        config::{Family, Rope, Scaling},
    },
    ops::Operators,
};

/// A tied Qwen3 of this shape; `heads` are query heads, key and value heads, and a head's width.
pub(super) fn qwen3(
    (n_layers, hidden_size, intermediate_size): (usize, usize, usize),
    (n_heads, n_kv_heads, head_dim): (usize, usize, usize),
    vocab_size: usize,
) -> Config {
    Config {
        family: Family::Qwen3,
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        rms_norm_eps: 1e-6,
        rope: Rope { theta: 1e6, scaling: Scaling::Default },
        max_positions: 40960,
        tied: true,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
    }
}

/// Matrices normal with deviation 0.02, norms one: what Qwen3's training begins with. The memory lies as that of a loaded checkpoint.
pub(super) fn random_model(config: Config, dtype: DType, device: &Device) -> Backbone {
    device.seed(0);
    let ones = |n: usize| Tensor::<1>::ones([n], device).cast(dtype);
    let stored = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Normal(0.0, 0.02), device).cast(dtype);
    let linear = |p: Projection| {
        let (d_in, d_out) = dims(&config, p);
        Linear { weight: stored([d_out, d_in]).transpose(), bias: None }
    };
    let block = |_| Block {
        input_norm: ones(config.hidden_size),
        post_attention_norm: ones(config.hidden_size),
        head_norms: Some((ones(config.head_dim), ones(config.head_dim))),
        linears: Projection::BLOCK.map(linear),
    };
    let embedding = stored([config.vocab_size, config.hidden_size]);
    Backbone {
        operators: Operators::best_for(device, dtype),
        blocks: (0..config.n_layers).map(block).collect(),
        norm: ones(config.hidden_size),
        head: embedding.clone().transpose(),
        embedding,
        config,
    }
}
