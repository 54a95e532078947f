//! Each operator's body on a device against its composed body on the CPU: values and every gradient, on small shapes that meet
//! the edges of the kernels (one row, rows and columns that fill no tile, several parts per thread, grouped heads, sequences of
//! several lengths with and without a past, a vocabulary that fills no block).

use std::{fmt, sync::Arc};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::bf16;

use super::{Heads, Operators, Sequence};
use crate::lora::Factors;

/// The check of one operator. The numbers are seeded: the same body gives the same results.
#[derive(Clone, Copy, Debug)]
pub struct SelfCheck {
    /// The operator's name.
    pub operator: &'static str,
    cases: fn(Numbers) -> Vec<Case>,
}

/// How far an operator's body is from the composed one.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// Of the results.
    pub values: Deviation,
    /// Of the gradients; `None` where the operator has none.
    pub gradients: Option<Deviation>,
}

/// The largest difference of two tensors' numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Deviation {
    /// Relative to the largest number of the composed body's tensor; infinite where numbers are missing or not finite.
    pub error: f64,
    /// The most that agrees.
    pub tolerance: f64,
    /// Which tensor of which case.
    pub place: String,
}

/// The most that agrees: of values, and of gradients.
type Tolerances = [f64; 2];

/// For sums of f32 in another order, and an exponential within 2 units in the last place. With AVX-512 the worst are 4e-7 and
/// 1e-6.
const FUSED: Tolerances = [3e-6, 1e-5];

/// For devices that may keep 11 bits of a product's factors (TF32), as the checks of their operators allow.
const ELSEWHERE: Tolerances = [1e-2, 1e-2];

impl SelfCheck {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self { operator: "rms_norm", cases: rms_norm },
        Self { operator: "rope", cases: rope },
        Self { operator: "swiglu", cases: swiglu },
        Self { operator: "linear", cases: linear },
        Self { operator: "attention", cases: attention },
        Self { operator: "token_nll", cases: token_nll },
        Self { operator: "token_scores", cases: token_scores },
        Self { operator: "sum_of_squares", cases: sum_of_squares },
    ];

    /// Runs the body that models use on `device` and compares it. Each of its results passes through `seen` first: the identity,
    /// or a fault that a test wants noticed.
    ///
    /// # Panics
    /// If the body does.
    pub fn run(&self, device: &Device, seen: &dyn Fn(Tensor<2>) -> Tensor<2>) -> Agreement {
        let operators = Operators::best_for(device, DType::F32);
        let tolerances = if operators == Operators::Fused { FUSED } else { ELSEWHERE };
        let [mut values, mut gradients] = tolerances.map(|t| Deviation { error: 0.0, tolerance: t, place: String::new() });
        let mut has_gradients = false;
        for case in (self.cases)(Numbers(1)) {
            let got = case.compute(operators, device, seen);
            let expected = case.compute(Operators::Composed, &Device::flex(), &|x| x);
            values.include(relative(&got.values, &expected.values), &case.name, "values");
            for (input, (got, expected)) in case.trained().zip(got.gradients.iter().zip(&expected.gradients)) {
                gradients.include(relative(got, expected), &case.name, &format!("gradient of {}", input.name));
                has_gradients = true;
            }
        }
        Agreement { values, gradients: has_gradients.then_some(gradients) }
    }
}

impl Agreement {
    /// Whether every difference is small enough.
    pub fn holds(&self) -> bool {
        self.parts().all(Deviation::holds)
    }

    fn parts(&self) -> impl Iterator<Item = &Deviation> {
        [&self.values].into_iter().chain(&self.gradients)
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts().find(|part| !part.holds()) {
            Some(Deviation { error, tolerance, place }) => {
                write!(f, "{place}: relative error {error:.1e} (at most {tolerance:.0e})")
            }
            None => {
                write!(f, "relative error {:.1e}", self.values.error)?;
                self.gradients.as_ref().map_or(Ok(()), |gradients| write!(f, ", of gradients {:.1e}", gradients.error))
            }
        }
    }
}

impl Deviation {
    fn holds(&self) -> bool {
        self.error <= self.tolerance
    }

    fn include(&mut self, error: f64, case: &str, tensor: &str) {
        if error > self.error {
            *self = Self { error, place: format!("{tensor}, {case}"), ..*self };
        }
    }
}

/// The largest difference, relative to the largest expected number.
fn relative(got: &[f32], expected: &[f32]) -> f64 {
    if got.len() != expected.len() {
        return f64::INFINITY;
    }
    let largest = expected.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs())));
    let difference = |(got, expected): (&f32, &f32)| f64::from((got - expected).abs());
    // A NaN, which `f64::max` would drop, counts as infinite.
    let worst = got.iter().zip(expected).map(difference).map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max);
    if worst == 0.0 { 0.0 } else { worst / largest }
}

/// One call of an operator.
struct Case {
    name: String,
    inputs: Vec<Input>,
    body: Box<Body>,
}

type Body = dyn Fn(Operators, &[Tensor<2>]) -> Tensor<2>;

struct Input {
    name: &'static str,
    values: Vec<f32>,
    shape: [usize; 2],
    trained: bool,
}

/// What a body computed: its output, and the gradient of each trained input (empty where there is none).
struct Computed {
    values: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

impl Case {
    fn new(name: String, inputs: Vec<Input>, body: impl Fn(Operators, &[Tensor<2>]) -> Tensor<2> + 'static) -> Self {
        Self { name, inputs, body: Box::new(body) }
    }

    fn trained(&self) -> impl Iterator<Item = &Input> {
        self.inputs.iter().filter(|input| input.trained)
    }

    /// The gradients are those of the output's sum with weights that differ from number to number.
    fn compute(&self, operators: Operators, device: &Device, seen: &dyn Fn(Tensor<2>) -> Tensor<2>) -> Computed {
        let device = device.clone().autodiff();
        let place = |input: &Input| {
            let x = tensor(&input.values, input.shape, &device);
            if input.trained { x.require_grad() } else { x }
        };
        let inputs: Vec<Tensor<2>> = self.inputs.iter().map(place).collect();
        let out = seen((self.body)(operators, &inputs));
        let values = read(out.clone());
        let upstream = tensor(&Numbers(2).reals(values.len()), out.dims(), &device);
        let loss = (out * upstream).sum();
        let trained = inputs.iter().zip(&self.inputs).filter(|(_, input)| input.trained);
        let gradients = match loss.is_tracked() {
            true => {
                let gradients = loss.backward();
                trained.map(|(x, _)| x.grad(&gradients).map(read).unwrap_or_default()).collect()
            }
            false => trained.map(|_| Vec::new()).collect(),
        };
        Computed { values, gradients }
    }
}

fn tensor(values: &[f32], shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::F32))
}

fn read(x: Tensor<2>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// A linear congruential generator (Knuth's MMIX constants): the same numbers on every machine.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as u32
    }

    /// `n` numbers in `[-1, 1)` with 24 bits.
    fn reals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next() as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn trained(&mut self, name: &'static str, shape: [usize; 2]) -> Input {
        Input { name, values: self.reals(shape[0] * shape[1]), shape, trained: true }
    }
}

fn rms_norm(mut numbers: Numbers) -> Vec<Case> {
    let case = |(n, groups, d)| {
        let inputs = vec![numbers.trained("x", [n, groups * d]), numbers.trained("weight", [1, d])];
        Case::new(format!("{n} rows of {groups} x {d}"), inputs, move |operators, x| {
            super::rms_norm(operators, x[0].clone(), &x[1].clone().reshape([d]), 1e-6)
        })
    };
    [(1, 1, 48), (13, 3, 15), (400, 1, 45)].map(case).into()
}

fn rope(mut numbers: Numbers) -> Vec<Case> {
    let case = |(n, heads, half): (usize, usize, usize)| {
        let angles: Vec<f32> = numbers.reals(n * half).iter().map(|x| x * 50.0).collect();
        let table = |name, values| Input { name, values, shape: [n, half], trained: false };
        let cos = table("cos", angles.iter().map(|a| a.cos()).collect());
        let sin = table("sin", angles.iter().map(|a| a.sin()).collect());
        let inputs = vec![numbers.trained("x", [n, heads * 2 * half]), cos, sin];
        Case::new(format!("{n} rows of {heads} x {}", 2 * half), inputs, |operators, x| {
            super::rope(operators, x[0].clone(), &x[1], &x[2])
        })
    };
    [(1, 2, 16), (37, 3, 5), (300, 3, 5)].map(case).into()
}

fn swiglu(mut numbers: Numbers) -> Vec<Case> {
    let case = |(n, d)| {
        let inputs = vec![numbers.trained("gate", [n, d]), numbers.trained("up", [n, d])];
        Case::new(format!("{n} x {d}"), inputs, |operators, x| super::swiglu(operators, x[0].clone() * 8.0, x[1].clone()))
    };
    [(1, 7), (13, 45), (3, 5000)].map(case).into()
}

/// How a matrix of weights is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Trained,
    Frozen,
    /// As checkpoints hold it: the transpose of what lies in memory.
    Turned,
    Bf16,
    TurnedBf16,
}

impl Held {
    /// A matrix `[d_in, d_out]` as it lies.
    fn input(self, numbers: &mut Numbers, [d_in, d_out]: [usize; 2]) -> Input {
        let shape = if self.is_turned() { [d_out, d_in] } else { [d_in, d_out] };
        let mut input = Input { trained: self == Self::Trained, ..numbers.trained("weight", shape) };
        if self.is_bf16() {
            input.values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        input
    }

    /// The weights that an operator takes. In bf16 the composed body, which takes all in one type, gets the same numbers in f32.
    fn weight(self, operators: Operators, input: &Tensor<2>) -> Tensor<2> {
        let is_short = self.is_bf16() && operators == Operators::Fused;
        let weight = if is_short { input.clone().cast(DType::BF16) } else { input.clone() };
        if self.is_turned() { weight.transpose() } else { weight }
    }

    fn is_turned(self) -> bool {
        matches!(self, Self::Turned | Self::TurnedBf16)
    }

    fn is_bf16(self) -> bool {
        matches!(self, Self::Bf16 | Self::TurnedBf16)
    }
}

/// The factors of an update of `rank`: the inputs at its start, if it has one.
fn factors(rank: usize, inputs: &[Tensor<2>]) -> Option<Factors> {
    (rank > 0).then(|| Factors { a: inputs[0].clone(), b: inputs[1].clone(), scale: 0.7 })
}

fn linear(mut numbers: Numbers) -> Vec<Case> {
    let case = |([n, d_in, d_out], rank, held, is_added): ([usize; 3], usize, Held, bool)| {
        let mut inputs = vec![numbers.trained("x", [n, d_in]), held.input(&mut numbers, [d_in, d_out])];
        if rank > 0 {
            inputs.extend([numbers.trained("a", [d_in, rank]), numbers.trained("b", [rank, d_out])]);
        }
        if is_added {
            inputs.push(numbers.trained("residual", [n, d_out]));
        }
        let name = format!("{n} x {d_in} x {d_out}, {held:?}, rank {rank}, residual {is_added}");
        Case::new(name, inputs, move |operators, x| {
            let residual = is_added.then(|| x[x.len() - 1].clone());
            let weight = held.weight(operators, &x[1]);
            super::linear(operators, x[0].clone(), &weight, factors(rank, &x[2..]).as_ref(), residual)
        })
    };
    [
        ([1, 45, 70], 0, Held::Frozen, false),
        ([1, 45, 70], 3, Held::Bf16, true),
        ([1, 45, 71], 3, Held::Turned, true),
        ([1, 300, 500], 3, Held::TurnedBf16, false),
        ([1, 45, 70], 3, Held::Trained, false),
        ([2, 33, 31], 0, Held::Turned, false),
        ([25, 45, 70], 3, Held::Turned, true),
        ([25, 45, 70], 3, Held::TurnedBf16, true),
        ([13, 33, 20], 3, Held::Bf16, false),
        ([25, 45, 70], 0, Held::Trained, false),
        ([61, 70, 100], 3, Held::Trained, true),
    ]
    .map(case)
    .into()
}

fn attention(mut numbers: Numbers) -> Vec<Case> {
    let case = |([n_heads, n_kv_heads, head_dim], lengths): ([usize; 3], &[(usize, usize)])| {
        let heads = Heads { n_heads, n_kv_heads, head_dim };
        let sequences: Arc<[Sequence]> = lengths.iter().map(|&(n_new, n_keys)| Sequence { n_new, n_keys }).collect();
        let n_new = sequences.iter().map(|s| s.n_new).sum();
        let n_keys = sequences.iter().map(|s| s.n_keys).sum();
        let inputs = vec![
            numbers.trained("q", [n_new, n_heads * head_dim]),
            numbers.trained("k", [n_keys, n_kv_heads * head_dim]),
            numbers.trained("v", [n_keys, n_kv_heads * head_dim]),
        ];
        let name = format!("{n_heads} and {n_kv_heads} heads of {head_dim}, new and all positions {lengths:?}");
        Case::new(name, inputs, move |operators, x| {
            let queries = x[0].clone() * 4.0; // so that some keys count much more than others
            super::attention(operators, [queries, x[1].clone(), x[2].clone()], heads, &sequences)
        })
    };
    /// Heads, and each sequence's new positions and keys.
    type Shape = ([usize; 3], &'static [(usize, usize)]);
    let cases: [Shape; 4] = [
        ([4, 2, 16], &[(1, 1), (5, 5), (5, 5), (53, 53), (1, 40), (7, 50)]),
        ([6, 2, 10], &[(13, 13), (50, 99)]),
        ([3, 3, 33], &[(49, 49)]),
        ([2, 1, 8], &[(1, 33)]),
    ];
    cases.map(case).into()
}

/// Shape `[tokens, d, vocab]`, rank of the head's update, the head.
const HEADS: [([usize; 3], usize, Held); 6] = [
    ([37, 45, 1100], 0, Held::Turned),
    ([37, 45, 1100], 0, Held::Trained),
    ([37, 45, 1100], 3, Held::TurnedBf16),
    ([13, 33, 513], 3, Held::Frozen),
    ([13, 33, 45], 3, Held::Trained),
    ([1, 33, 45], 0, Held::Bf16),
];

type Score = fn(Operators, Tensor<2>, &Tensor<2>, Option<&Factors>, Tensor<1, Int>) -> Tensor<2>;

/// Cases in which some of the positions are supervised.
fn head_cases(mut numbers: Numbers, has_gradients: bool, score: Score) -> Vec<Case> {
    let case = |([n, d, vocab], rank, held): ([usize; 3], usize, Held)| {
        let mut inputs = vec![numbers.trained("hidden", [n + 3, d]), held.input(&mut numbers, [d, vocab])];
        if rank > 0 {
            inputs.extend([numbers.trained("a", [d, rank]), numbers.trained("b", [rank, vocab])]);
        }
        inputs.iter_mut().for_each(|input| input.trained &= has_gradients);
        let positions: Vec<i32> = (0..n).map(|i| (i + 3 * usize::from(2 * i >= n)) as i32).collect();
        let mut targets: Vec<i32> = (0..n).map(|_| (numbers.next() as usize % vocab) as i32).collect();
        targets[0] = vocab as i32 - 1;
        Case::new(format!("{n} x {d} x {vocab}, {held:?}, rank {rank}"), inputs, move |operators, x| {
            let integers =
                |values: &[i32]| Tensor::<1, Int>::from_data(TensorData::new(values.to_vec(), [values.len()]), &x[0].device());
            let supervised = x[0].clone().select(0, integers(&positions));
            let head = held.weight(operators, &x[1]);
            score(operators, supervised, &head, factors(rank, &x[2..]).as_ref(), integers(&targets))
        })
    };
    HEADS.map(case).into()
}

fn token_nll(numbers: Numbers) -> Vec<Case> {
    head_cases(numbers, true, |operators, hidden, head, factors, targets| {
        super::token_nll(operators, hidden, head, factors, targets).unsqueeze_dim(1)
    })
}

/// The likelihoods, and the tokens as parts of the vocabulary.
fn token_scores(numbers: Numbers) -> Vec<Case> {
    head_cases(numbers, false, |operators, hidden, head, factors, targets| {
        let (nll, best) = super::token_scores(operators, hidden, head, factors, targets);
        let best = best.float().cast(DType::F32) / head.dims()[1] as f64;
        Tensor::stack(vec![nll, best], 1)
    })
}

fn sum_of_squares(mut numbers: Numbers) -> Vec<Case> {
    let case = |n| {
        let inputs = vec![Input { trained: false, ..numbers.trained("x", [1, n]) }];
        Case::new(format!("{n} numbers"), inputs, move |operators, x| {
            let x = x[0].clone().inner().reshape([n]);
            let sum = match operators {
                Operators::Fused => super::sum_of_squares(x.clone()),
                Operators::Composed => f64::from(x.clone().square().sum().into_scalar::<f32>()),
            };
            tensor(&[sum as f32], [1, 1], &x.device())
        })
    };
    [1, 45, 40_000].map(case).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(self_check: &SelfCheck, fault: &str, seen: &dyn Fn(Tensor<2>) -> Tensor<2>, expected: bool) {
        let agreement = self_check.run(&Device::flex(), seen);
        assert_eq!(agreement.holds(), expected, "{}, {fault}: {agreement} {agreement:?}", self_check.operator);
    }

    #[test]
    fn every_operator_agrees_and_faults_are_noticed() {
        for operator in &SelfCheck::ALL {
            check(operator, "no fault", &|x| x, true);
            let last = |x: &Tensor<2>| x.dims().map(|n| n - 1..n);
            check(
                operator,
                "one number",
                &|x| {
                    let at = last(&x);
                    let off = x.clone().slice(at.clone()) * 1.1 + 0.01;
                    x.slice_assign(at, off)
                },
                false,
            );
            check(
                operator,
                "a NaN",
                &|x| {
                    let at = x.dims().map(|_| 0..1);
                    let nan = x.clone().slice(at.clone()) * f32::NAN;
                    x.slice_assign(at, nan)
                },
                false,
            );
            let has_gradients = operator.run(&Device::flex(), &|x| x).gradients.is_some();
            check(operator, "twice the gradient", &|x| x.clone() * 2.0 - x.detach(), !has_gradients);
            check(operator, "cut from the graph", &|x| x.detach(), !has_gradients);
        }
    }
}
