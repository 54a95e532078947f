//! Numeric trust checks of the backend in use: the operators that have been wrong in some release of Burn, on the shapes that
//! models, losses and adapters need, against plain loops; and the model's own operators against their composed bodies on the CPU.

mod operators;
mod reference;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, bf16, f16};
use serde::Serialize;
use weact_core::ops::SelfCheck;

pub use self::operators::{Backend, Operators};
use self::reference::{Finding, Numbers, agree, differences, dot, gradients, product, read, softmax, tensor, transposed};

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Whether all results were right. A float type that the device does not have passes, as `unsupported`.
    pub passed: bool,
    /// What was covered, or the first deviation.
    pub detail: String,
}

/// Runs every check on `device`. The numbers are seeded: the same operators give the same results.
///
/// A panic of an operator is a failed check; the others still run.
pub fn trust(device: &Device, ops: &dyn Operators) -> Vec<Check> {
    let run = |name: &'static str, check: &dyn Fn() -> Finding| {
        let finding = catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Err(format!("panicked: {}", text.unwrap_or("no message")))
        });
        let passed = finding.is_ok();
        Check { name, passed, detail: finding.unwrap_or_else(|deviation| deviation) }
    };
    let of_backend = CHECKS.iter().map(|(name, check)| run(name, &|| check(device, ops)));
    let of_model = SelfCheck::ALL.iter().map(|check| run(check.operator, &|| model_operator(check, device, ops)));
    of_backend.chain(of_model).collect()
}

fn model_operator(check: &SelfCheck, device: &Device, ops: &dyn Operators) -> Finding {
    let agreement = check.run(device, &|result| ops.model_operator(check.operator, result));
    if agreement.holds() { Ok(agreement.to_string()) } else { Err(agreement.to_string()) }
}

type CheckFn = fn(&Device, &dyn Operators) -> Finding;

const CHECKS: [(&str, CheckFn); 14] = [
    ("transposed product", transposed_product),
    ("gradient of the transposed product", transposed_product_gradient),
    ("thin and LoRA products", thin_products),
    ("precision of a product", product_precision),
    ("softmax", large_softmax),
    ("masked loss", masked_loss),
    ("lookup of repeated indices", repeated_lookup),
    ("concatenation with frozen inputs", frozen_concatenation),
    ("slice assignment", slice_assignment),
    ("causal mask", causal_mask),
    ("values in f32", |device, ops| values_survive(device, ops, FloatDType::F32, |v| v, |v| TensorData::new(v, [1, 5]))),
    ("values in f16", |device, ops| {
        let upload = |v: Vec<f32>| TensorData::new(v.into_iter().map(f16::from_f32).collect(), [1, 5]);
        values_survive(device, ops, FloatDType::F16, |v| f16::from_f32(v).to_f32(), upload)
    }),
    ("values in bf16", |device, ops| {
        let upload = |v: Vec<f32>| TensorData::new(v.into_iter().map(bf16::from_f32).collect(), [1, 5]);
        values_survive(device, ops, FloatDType::BF16, |v| bf16::from_f32(v).to_f32(), upload)
    }),
    ("determinism", determinism),
];

/// For results that are exact in f32.
const EXACT: f64 = 0.0;
/// For what passes through an exponential, and for gradients that finite differences tell.
const ROUNDED: f64 = 1e-5;

/// Small sizes, and those around the vector and tile widths of kernels.
const SIZES: [usize; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 64];

/// All `[m, k, n]` of [`SIZES`].
fn shapes() -> impl Iterator<Item = [usize; 3]> {
    SIZES.into_iter().flat_map(|m| SIZES.into_iter().flat_map(move |k| SIZES.map(|n| [m, k, n])))
}

fn leaf<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor(values, shape, &device.clone().autodiff()).require_grad()
}

fn integers<const D: usize>(values: &[usize], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    let values: Vec<i32> = values.iter().map(|&v| v as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// <https://github.com/tracel-ai/burn/issues/5304>: wrong values for some shapes of a transposed left factor.
fn transposed_product(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(1);
    for [m, k, n] in shapes() {
        let (a, b) = (numbers.quarters(k * m), numbers.quarters(k * n));
        let got = read(ops.matmul_transposed(tensor(&a, [k, m], device), tensor(&b, [k, n], device)));
        agree(&format!("m {m}, k {k}, n {n}"), &got, &product(&transposed(&a, [k, m]), &b, [m, k, n]), EXACT)?;
    }
    Ok(format!("{} shapes, exact", shapes().count()))
}

/// Of `sum(W * A^T B)`: `dA = B W^T`, `dB = A W`. With all weights one, a transposed gradient could pass.
fn transposed_product_gradient(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(2);
    for [m, k, n] in shapes() {
        let (a, b, w) = (numbers.quarters(k * m), numbers.quarters(k * n), numbers.quarters(m * n));
        let (leaf_a, leaf_b) = (leaf(&a, [k, m], device), leaf(&b, [k, n], device));
        let output = ops.matmul_transposed(leaf_a.clone(), leaf_b.clone());
        let got = gradients(&output, &w, &[&leaf_a, &leaf_b])?;
        let shape = format!("m {m}, k {k}, n {n}");
        agree(&format!("{shape}, left"), &got[0], &product(&b, &transposed(&w, [m, n]), [k, n, m]), EXACT)?;
        agree(&format!("{shape}, right"), &got[1], &product(&a, &w, [k, m, n]), EXACT)?;
    }
    Ok(format!("{} shapes, exact", shapes().count()))
}

/// <https://github.com/tracel-ai/burn/issues/5122>: a wrong fused product where one side is thin. A matrix and a vector with the
/// sum after it, then `y = x W + 2 (x A) B` and its gradients for low ranks, decoding (one position) included.
fn thin_products(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(3);
    let (h, v) = (numbers.quarters(12), numbers.quarters(3));
    let out = ops.matmul(tensor(&h, [4, 3], device), tensor(&v, [3, 1], device));
    let twice: Vec<f64> = product(&h, &v, [4, 3, 1]).iter().map(|x| 2.0 * x).collect();
    agree("[4, 3] x [3, 1] twice", &read(ops.add(out.clone(), out)), &twice, EXACT)?;

    let (d_in, d_out) = (16, 8);
    for (seq, rank) in [1, 4].into_iter().flat_map(|seq| [1, 2, 4].map(|rank| (seq, rank))) {
        let (x, w) = (numbers.quarters(seq * d_in), numbers.quarters(d_in * d_out));
        let (a, b, weights) = (numbers.quarters(d_in * rank), numbers.quarters(rank * d_out), numbers.quarters(seq * d_out));
        let expected = |a: &[f64], b: &[f64]| -> Vec<f64> {
            let delta = product(&product(&x, a, [seq, d_in, rank]), b, [seq, rank, d_out]);
            product(&x, &w, [seq, d_in, d_out]).iter().zip(&delta).map(|(y, d)| y + 2.0 * d).collect()
        };
        let tracked = device.clone().autodiff();
        let (input, weight) = (tensor(&x, [seq, d_in], &tracked), tensor(&w, [d_in, d_out], &tracked));
        let (leaf_a, leaf_b) = (leaf(&a, [d_in, rank], device), leaf(&b, [rank, d_out], device));
        let delta = ops.matmul(ops.matmul(input.clone(), leaf_a.clone()), leaf_b.clone());
        let output = ops.add(ops.matmul(input, weight), delta.mul_scalar(2.0));
        let shape = format!("seq {seq}, rank {rank}");
        agree(&shape, &read(output.clone()), &expected(&a, &b), EXACT)?;
        let got = gradients(&output, &weights, &[&leaf_a, &leaf_b])?;
        agree(&format!("{shape}, gradient of A"), &got[0], &differences(|a| dot(&weights, &expected(a, &b)), &a), ROUNDED)?;
        agree(&format!("{shape}, gradient of B"), &got[1], &differences(|b| dot(&weights, &expected(&a, b)), &b), ROUNDED)?;
    }
    Ok("a vector, and ranks 1, 2 and 4 for 1 and 4 positions".to_owned())
}

/// The other product checks use numbers so short that a narrower multiplication passes. One long factor on a diagonal shows what
/// is left of it. TF32 keeps 11 bits of each factor and passes, bf16's 8 bits do not.
fn product_precision(device: &Device, ops: &dyn Operators) -> Finding {
    const N: usize = 32;
    let mut numbers = Numbers::new(4);
    let (diagonal, b) = (numbers.reals(N), numbers.reals(N * N));
    let a: Vec<f64> = (0..N * N).map(|i| if i / N == i % N { diagonal[i / N] } else { 0.0 }).collect();
    let got = read(ops.matmul(tensor(&a, [N, N], device), tensor(&b, [N, N], device)));
    let errors = got.iter().zip(&b).enumerate().map(|(i, (got, b))| (got / (diagonal[i / N] * b) - 1.0).abs());
    // A NaN, which `f64::max` would drop, counts as infinite.
    let worst = errors.map(|error| if error.is_nan() { f64::INFINITY } else { error }).fold(0.0, f64::max);
    let detail = format!("largest relative error {worst:.1e}");
    if worst <= 2e-3 { Ok(detail) } else { Err(detail) }
}

fn large_softmax(device: &Device, ops: &dyn Operators) -> Finding {
    let mut x = Numbers::new(5).reals(15);
    x.extend([1000.0, 999.0, -1000.0, 0.0, 998.5]);
    let expected = softmax(&x, 5);
    agree("softmax", &read(ops.softmax(tensor(&x, [4, 5], device))), &expected, ROUNDED)?;
    let logs = read(ops.log_softmax(tensor(&x, [2, 2, 5], device)));
    agree("exp of log-softmax", &logs.iter().map(|v| v.exp()).collect::<Vec<_>>(), &expected, ROUNDED)?;
    agree("log-softmax of -1000 beside 1000", &logs[17..18], &[-2000.0 - (1.0 + (-1f64).exp() + (-1.5f64).exp()).ln()], ROUNDED)?;
    Ok("4 rows, logits to 1000".to_owned())
}

/// <https://github.com/tracel-ai/burn/issues/3427>: backward of gather where sizes differ. Value and gradient of Eq. 5's
/// masked sum.
fn masked_loss(device: &Device, ops: &dyn Operators) -> Finding {
    const VOCAB: usize = 7;
    let mut numbers = Numbers::new(6);
    for (batch, seq) in (1..=3).flat_map(|batch| (1..=5).map(move |seq| (batch, seq))) {
        let n = batch * seq;
        let (logits, targets) = (numbers.reals(n * VOCAB), numbers.indices(n, VOCAB));
        let mask: Vec<f64> = (0..n).map(|position| if position % 3 == 1 { 0.0 } else { 1.0 }).collect();
        let expected = |logits: &[f64]| -> f64 {
            let p = softmax(logits, VOCAB);
            (0..n).map(|i| mask[i] * p[i * VOCAB + targets[i]].ln()).sum()
        };
        let x = leaf(&logits, [batch, seq, VOCAB], device);
        let chosen = ops.gather(ops.log_softmax(x.clone()), integers(&targets, [batch, seq, 1], &x.device()));
        let shape = format!("batch {batch}, seq {seq}");
        agree(&shape, &[dot(&mask, &read(chosen.clone()))], &[expected(&logits)], ROUNDED)?;
        let got = gradients(&chosen, &mask, &[&x])?;
        agree(&format!("{shape}, gradient"), &got[0], &differences(expected, &logits), ROUNDED)?;
    }
    Ok("batch 1 to 3, seq 1 to 5, with gradients".to_owned())
}

/// Rows that are looked up several times must collect all their gradients.
fn repeated_lookup(device: &Device, ops: &dyn Operators) -> Finding {
    const ROWS: usize = 6;
    const WIDTH: usize = 3;
    let mut numbers = Numbers::new(7);
    for (batch, seq) in (1..=3).flat_map(|batch| (1..=5).map(move |seq| (batch, seq))) {
        let n = batch * seq;
        // All but two rows are left out, so that from three positions on one repeats.
        let ids: Vec<usize> = numbers.indices(n, 2).into_iter().map(|i| 4 * i + 1).collect();
        let (table, weights) = (numbers.quarters(ROWS * WIDTH), numbers.quarters(n * WIDTH));
        let rows: Vec<f64> = ids.iter().flat_map(|&id| table[id * WIDTH..][..WIDTH].to_vec()).collect();
        let mut collected = vec![0.0; ROWS * WIDTH];
        for (i, weight) in weights.iter().enumerate() {
            collected[ids[i / WIDTH] * WIDTH + i % WIDTH] += weight;
        }
        let x = leaf(&table, [ROWS, WIDTH], device);
        let embedded = ops.embed(x.clone(), integers(&ids, [batch, seq], &x.device()));
        let selected = ops.select(x.clone(), integers(&ids, [n], &x.device()));
        let shape = format!("batch {batch}, seq {seq}");
        agree(&format!("embedding, {shape}"), &read(embedded.clone()), &rows, EXACT)?;
        agree(&format!("select, {shape}"), &read(selected.clone()), &rows, EXACT)?;
        agree(&format!("gradient of embedding, {shape}"), &gradients(&embedded, &weights, &[&x])?[0], &collected, EXACT)?;
        agree(&format!("gradient of select, {shape}"), &gradients(&selected, &weights, &[&x])?[0], &collected, EXACT)?;
    }
    Ok("embedding and select, batch 1 to 3, seq 1 to 5, with gradients".to_owned())
}

/// Frozen parts around and between trained ones must not cut these from the graph.
fn frozen_concatenation(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(8);
    for (dim, shape) in [(0, [2, 5]), (1, [5, 2])] {
        let parts: Vec<Vec<f64>> = (0..4).map(|_| numbers.quarters(10)).collect();
        let weights = numbers.quarters(40);
        let expected = |parts: &[Vec<f64>]| -> Vec<f64> {
            let rows = |row: usize| parts.iter().flat_map(move |part| part[row * 2..][..2].iter().copied());
            if dim == 0 { parts.concat() } else { (0..5).flat_map(rows).collect() }
        };
        let gradient_of = |i: usize| {
            let loss = |part: &[f64]| {
                let mut moved = parts.clone();
                moved[i] = part.to_vec();
                dot(&weights, &expected(&moved))
            };
            differences(loss, &parts[i])
        };
        let frozen = |i: usize| tensor(&parts[i], shape, &device.clone().autodiff());
        let (first, second) = (leaf(&parts[1], shape, device), leaf(&parts[3], shape, device));
        let output = ops.cat(vec![frozen(0), first.clone(), frozen(2), second.clone()], dim);
        agree(&format!("dimension {dim}"), &read(output.clone()), &expected(&parts), EXACT)?;
        let got = gradients(&output, &weights, &[&first, &second])?;
        agree(&format!("gradient of the first, dimension {dim}"), &got[0], &gradient_of(1), ROUNDED)?;
        agree(&format!("gradient of the second, dimension {dim}"), &got[1], &gradient_of(3), ROUNDED)?;
    }
    Ok("two trained and two frozen inputs, both dimensions, with gradients".to_owned())
}

fn slice_assignment(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(9);
    let (x, values, weights) = (numbers.quarters(15), numbers.quarters(6), numbers.quarters(15));
    // Rows 1 and 2 of [5, 3].
    let replace = |whole: &[f64], part: &[f64]| [&whole[..3], part, &whole[9..]].concat();
    let (leaf_x, leaf_values) = (leaf(&x, [5, 3], device), leaf(&values, [2, 3], device));
    let output = ops.slice_assign(leaf_x.clone(), 1..3, leaf_values.clone());
    agree("values", &read(output.clone()), &replace(&x, &values), EXACT)?;
    let got = gradients(&output, &weights, &[&leaf_x, &leaf_values])?;
    agree("gradient of the whole", &got[0], &replace(&weights, &[0.0; 6]), EXACT)?;
    agree("gradient of the part", &got[1], &weights[3..9], EXACT)?;
    Ok("two rows of five, with gradients".to_owned())
}

/// Softmax over causally masked scores: hidden positions get exactly zero weight and zero gradient, never NaN.
fn causal_mask(device: &Device, ops: &dyn Operators) -> Finding {
    let mut numbers = Numbers::new(10);
    for seq in 1..=6 {
        let (scores, weights) = (numbers.reals(seq * seq), numbers.reals(seq * seq));
        let expected = |scores: &[f64]| -> Vec<f64> {
            let visible = |row: usize| softmax(&scores[row * seq..][..=row], row + 1);
            (0..seq).flat_map(|row| [visible(row), vec![0.0; seq - row - 1]].concat()).collect()
        };
        let x = leaf(&scores, [seq, seq], device);
        let output = ops.softmax(ops.causal(x.clone()));
        let got = read(output.clone());
        agree(&format!("seq {seq}"), &got, &expected(&scores), ROUNDED)?;
        let hidden = (0..seq * seq).filter(|i| i % seq > i / seq).map(|i| got[i]).collect::<Vec<_>>();
        agree(&format!("seq {seq}, hidden"), &hidden, &vec![0.0; hidden.len()], EXACT)?;
        let gradient = &gradients(&output, &weights, &[&x])?[0];
        agree(&format!("seq {seq}, gradient"), gradient, &differences(|s| dot(&weights, &expected(s)), &scores), ROUNDED)?;
    }
    Ok("seq 1 to 6, with gradients".to_owned())
}

/// <https://github.com/tracel-ai/burn/issues/4181>: a backend that read 1.0 in bf16 as 1.875. `round` tells what one value becomes
/// in `dtype`, `upload` makes the five of them in that type, as a checkpoint holds them.
fn values_survive(
    device: &Device,
    ops: &dyn Operators,
    dtype: FloatDType,
    round: fn(f32) -> f32,
    upload: fn(Vec<f32>) -> TensorData,
) -> Finding {
    if !device.supports_dtype(dtype) {
        return Ok("unsupported".to_owned());
    }
    let values = [1.0, -0.5, 65504.0, 1e-8, 3e38];
    let rounded = values.map(|v| f64::from(round(v)));
    let doubled = values.map(|v| f64::from(round(round(v) + round(v))));

    let x = Tensor::<2>::from_data(upload(values.to_vec()), (device, DType::from(dtype)));
    agree("upload and read back", &read(x.clone()), &rounded, EXACT)?;
    agree("sum", &read(ops.add(x.clone(), x.clone())), &doubled, EXACT)?;
    agree("cast to f32", &read(ops.cast(x, FloatDType::F32)), &rounded, EXACT)?;
    let wide = Tensor::<2>::from_data(TensorData::new(values.to_vec(), [1, 5]), (device, DType::F32));
    let cast = ops.cast(wide, dtype);
    if cast.dtype() != DType::from(dtype) {
        return Err(format!("cast from f32: the result is {:?}", cast.dtype()));
    }
    agree("cast from f32", &read(cast), &rounded, EXACT)?;
    Ok("1, -0.5, 65504, 1e-8, 3e38: read back, added, cast".to_owned())
}

fn determinism(device: &Device, ops: &dyn Operators) -> Finding {
    let (m, k, n) = (96, 160, 130);
    let mut numbers = Numbers::new(11);
    let (a, b) = (numbers.reals(k * m), numbers.reals(k * n));
    let once = || read(ops.softmax(ops.matmul_transposed(tensor(&a, [k, m], device), tensor(&b, [k, n], device))));
    let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect::<Vec<_>>();
    if bits(once()) != bits(once()) {
        return Err("two runs of the same product and softmax differ".to_owned());
    }
    Ok(format!("product and softmax [{m}, {n}] twice, same bits"))
}

#[cfg(test)]
mod tests {
    use std::{
        ops::Range,
        sync::atomic::{AtomicU32, Ordering},
    };

    use super::*;

    /// The backend's operators but for the one named, which is wrong.
    struct Broken {
        fault: &'static str,
        calls: AtomicU32,
    }

    impl Broken {
        fn is(&self, fault: &str) -> bool {
            self.fault == fault
        }
    }

    /// One element off.
    fn spoil(x: Tensor<2>) -> Tensor<2> {
        let last = x.clone().slice([x.dims()[0] - 1..x.dims()[0], x.dims()[1] - 1..x.dims()[1]]);
        let [rows, columns] = x.dims();
        x.slice_assign([rows - 1..rows, columns - 1..columns], last + 0.25)
    }

    /// The same values, twice the gradient.
    fn spoil_gradient<const D: usize>(x: Tensor<D>) -> Tensor<D> {
        x.clone().mul_scalar(2.0) - x.detach()
    }

    impl Operators for Broken {
        fn matmul(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
            match self.fault {
                "vector" if b.dims() == [3, 1] => spoil(a.matmul(b)),
                "NaN" if a.dims() == [32, 32] => a.matmul(b).slice_assign([0..1, 0..1], tensor(&[f64::NAN], [1, 1], &device())),
                "decode" if a.dims() == [1, 4] => spoil(a.matmul(b)),
                "decode gradient" if a.dims() == [1, 16] => spoil_gradient(a.matmul(b)),
                "bf16 product" => {
                    let short = |x: Tensor<2>| x.cast(FloatDType::BF16).cast(FloatDType::F32);
                    short(a).matmul(short(b))
                }
                _ => Backend.matmul(a, b),
            }
        }

        fn matmul_transposed(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
            let shape = (a.dims(), b.dims());
            let right = Backend.matmul_transposed(a, b);
            match self.fault {
                "one shape" if shape == ([33, 7], [33, 31]) => spoil(right),
                "gradient of a product" => spoil_gradient(right),
                "panic" => panic!("no kernel"),
                _ => right,
            }
        }

        fn add(&self, a: Tensor<2>, b: Tensor<2>) -> Tensor<2> {
            if self.is("add") { a } else { Backend.add(a, b) }
        }

        fn softmax(&self, x: Tensor<2>) -> Tensor<2> {
            let call = self.calls.fetch_add(1, Ordering::Relaxed);
            match self.fault {
                "unstable softmax" => x.clone().exp() / x.exp().sum_dim(1),
                "softmax differs from call to call" => Backend.softmax(x).mul_scalar(1.0 + f64::from(call) * 1e-6),
                _ => Backend.softmax(x),
            }
        }

        fn log_softmax(&self, x: Tensor<3>) -> Tensor<3> {
            let right = Backend.log_softmax(x);
            if self.is("log-softmax gradient") { spoil_gradient(right) } else { right }
        }

        fn gather(&self, x: Tensor<3>, indices: Tensor<3, Int>) -> Tensor<3> {
            let indices = if self.is("gather ignores its index") { indices.mul_scalar(0) } else { indices };
            Backend.gather(x, indices)
        }

        fn select(&self, x: Tensor<2>, rows: Tensor<1, Int>) -> Tensor<2> {
            let right = Backend.select(x, rows);
            if self.is("select gradient") { spoil_gradient(right) } else { right }
        }

        fn embed(&self, table: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
            let ids = if self.is("embedding reads its neighbour") { ids.add_scalar(-1) } else { ids };
            Backend.embed(table, ids)
        }

        fn causal(&self, scores: Tensor<2>) -> Tensor<2> {
            if self.is("no causal mask") { scores } else { Backend.causal(scores) }
        }

        fn cat(&self, parts: Vec<Tensor<2>>, dim: usize) -> Tensor<2> {
            let right = Backend.cat(parts, dim);
            if self.is("cat cuts the graph") { right.detach() } else { right }
        }

        fn slice_assign(&self, x: Tensor<2>, rows: Range<usize>, values: Tensor<2>) -> Tensor<2> {
            let values = if self.is("slice assignment keeps the old values") { x.clone().slice([rows.clone()]) } else { values };
            Backend.slice_assign(x, rows, values)
        }

        fn model_operator(&self, name: &'static str, result: Tensor<2>) -> Tensor<2> {
            match self.fault {
                "attention" if name == "attention" => spoil(result),
                "gradient of linear" if name == "linear" => spoil_gradient(result),
                _ => result,
            }
        }

        fn cast(&self, x: Tensor<2>, dtype: FloatDType) -> Tensor<2> {
            match self.fault {
                "cast halves" => Backend.cast(x, dtype).mul_scalar(0.5),
                "cast does nothing" => x,
                "cast saturates" if dtype == FloatDType::F16 => Backend.cast(x, dtype).clamp(-65504.0, 65504.0),
                _ => Backend.cast(x, dtype),
            }
        }
    }

    fn failures(ops: &dyn Operators) -> Vec<Check> {
        trust(&device(), ops).into_iter().filter(|check| !check.passed).collect()
    }

    fn device() -> Device {
        match std::env::var("WEACT_DEVICE").as_deref() {
            Err(_) | Ok("cpu") => Device::flex(),
            Ok(other) => panic!("WEACT_DEVICE is {other:?}, this build has cpu"),
        }
    }

    #[test]
    fn the_backend_passes() {
        assert_eq!(failures(&Backend), []);
    }

    #[test]
    fn a_wrong_operator_fails_the_checks_that_use_it() {
        let cases: [(&str, &[&str]); 23] = [
            ("one shape", &["transposed product"]),
            ("gradient of a product", &["gradient of the transposed product"]),
            ("vector", &["thin and LoRA products"]),
            ("decode", &["thin and LoRA products"]),
            ("decode gradient", &["thin and LoRA products"]),
            ("bf16 product", &["thin and LoRA products", "precision of a product"]),
            ("NaN", &["precision of a product"]),
            ("add", &["thin and LoRA products", "values in f32", "values in f16", "values in bf16"]),
            ("unstable softmax", &["softmax"]),
            ("softmax differs from call to call", &["determinism"]),
            ("log-softmax gradient", &["masked loss"]),
            ("gather ignores its index", &["masked loss"]),
            ("select gradient", &["lookup of repeated indices"]),
            ("embedding reads its neighbour", &["lookup of repeated indices"]),
            ("no causal mask", &["causal mask"]),
            ("cat cuts the graph", &["concatenation with frozen inputs"]),
            ("slice assignment keeps the old values", &["slice assignment"]),
            ("cast halves", &["values in f32", "values in f16", "values in bf16"]),
            ("cast does nothing", &["values in f16", "values in bf16"]),
            ("cast saturates", &["values in f16"]),
            ("attention", &["attention"]),
            ("gradient of linear", &["linear"]),
            ("panic", &["transposed product", "gradient of the transposed product", "determinism"]),
        ];
        for (fault, expected) in cases {
            let failed = failures(&Broken { fault, calls: AtomicU32::new(0) });
            assert_eq!(failed.iter().map(|check| check.name).collect::<Vec<_>>(), expected, "{fault}: {failed:#?}");
        }
    }

    #[test]
    fn a_deviation_is_named() {
        let detail = |fault| failures(&Broken { fault, calls: AtomicU32::new(0) })[0].detail.clone();
        assert!(detail("one shape").starts_with("m 7, k 33, n 31: element 216 is "));
        assert_eq!(detail("panic"), "panicked: no kernel");
        assert_eq!(detail("cast halves"), "cast to f32: element 0 is 0.5, expected 1");
        assert_eq!(detail("cat cuts the graph"), "the result is cut from its inputs' graph");
    }
}
