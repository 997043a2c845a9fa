package admission

import (
	"hash/maphash"
	"math"
	"net/netip"
	"strconv"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"golang.org/x/time/rate"
)

const (
	limitShards = 64        // so that requests of different callers do not wait for one lock
	limitKeys   = 1024 * 64 // callers remembered by a limit; the one not seen for longest is forgotten first
)

// Rate is how often something may be done: PerSecond in the long run, Burst at once. PerSecond 0 means without limit.
type Rate struct {
	PerSecond float64
	Burst     int
}

// Limit is a token bucket for each caller.
type Limit struct {
	name   string
	rate   Rate
	policy []string // value of RateLimit-Policy
	seed   maphash.Seed
	shards [limitShards]*lru.Cache[string, *rate.Limiter]
}

// NewLimit makes one, whose name clients are told; nil without a rate.
func NewLimit(name string, r Rate) *Limit {
	if r.PerSecond <= 0 {
		return nil
	}
	l := &Limit{name: name, rate: r, seed: maphash.MakeSeed(),
		policy: []string{strconv.Quote(name) + ";q=" + strconv.Itoa(r.Burst) + ";w=" + strconv.Itoa(int(math.Ceil(float64(r.Burst)/r.PerSecond)))}}
	for i := range l.shards {
		l.shards[i], _ = lru.New[string, *rate.Limiter](limitKeys / limitShards) // fails for sizes below 1 only
	}
	return l
}

// Allowance is what a limit says of one request.
type Allowance struct {
	OK    bool
	limit *Limit
	left  float64 // tokens
}

// Take takes one token of the caller's. A nil limit allows everything.
func (l *Limit) Take(key string, now time.Time) Allowance {
	if l == nil {
		return Allowance{OK: true}
	}
	shard := l.shards[maphash.String(l.seed, key)%limitShards]
	bucket, ok := shard.Get(key)
	if !ok {
		bucket = rate.NewLimiter(rate.Limit(l.rate.PerSecond), l.rate.Burst)
		if other, there, _ := shard.PeekOrAdd(key, bucket); there {
			bucket = other
		}
	}
	return Allowance{OK: bucket.AllowN(now, 1), limit: l, left: max(bucket.TokensAt(now), 0)}
}

// Scarce says that less than half of the burst is left, so that clients should be told.
func (a Allowance) Scarce() bool { return a.limit != nil && a.left < float64(a.limit.rate.Burst)/2 }

// Headers give RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-10).
func (a Allowance) Headers() (policy, limit []string) {
	full := (float64(a.limit.rate.Burst) - a.left) / a.limit.rate.PerSecond
	return a.limit.policy, []string{strconv.Quote(a.limit.name) + ";r=" + strconv.Itoa(int(a.left)) + ";t=" + strconv.Itoa(int(math.Ceil(full)))}
}

// RetryAfter is when there is a token again.
func (a Allowance) RetryAfter() time.Duration {
	return time.Duration((1 - a.left) / a.limit.rate.PerSecond * float64(time.Second))
}

// addressKey is what an address counts as: whoever has an IPv6 address usually has the /64 around it.
func addressKey(a netip.Addr) string {
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			a = p.Addr()
		}
	}
	b := a.As16()
	return string(b[:])
}

// Limits are those of all callers but the checkout.
type Limits struct{ Buyer, Address *Limit }

// Take takes what one request costs, and gives the allowance that is to be told: the one that refuses, else the scarcest.
func (l *Limits) Take(c *Caller, now time.Time) Allowance {
	if c.Checkout {
		return Allowance{OK: true}
	}
	address := Allowance{OK: true}
	if l.Address != nil {
		if address = l.Address.Take(addressKey(c.Address), now); !address.OK {
			return address
		}
	}
	if c.Buyer == "" {
		return address
	}
	if buyer := l.Buyer.Take(c.Buyer, now); !buyer.OK || buyer.Scarce() {
		return buyer
	}
	return address
}
