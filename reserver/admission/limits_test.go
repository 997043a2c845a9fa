package admission

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

func TestLimits(t *testing.T) {
	l := &Limits{Buyer: NewLimit("buyer", Rate{PerSecond: 2, Burst: 4}), Address: NewLimit("address", Rate{PerSecond: 10, Burst: 8})}
	now := time.Now()
	ann := &Caller{Buyer: "ann", Address: netip.MustParseAddr("198.51.100.7")}
	for i := range 4 {
		a := l.Take(ann, now)
		if scarce := i >= 2; !a.OK || a.Scarce() != scarce {
			t.Errorf("request %d: allowed %t, told of scarcity %t", i, a.OK, a.Scarce())
		}
	}
	a := l.Take(ann, now)
	policy, limit := a.Headers()
	if a.OK || a.RetryAfter() != 500*time.Millisecond || policy[0] != `"buyer";q=4;w=2` || limit[0] != `"buyer";r=0;t=2` {
		t.Errorf("the fifth: allowed %t, again after %v, %s, %s", a.OK, a.RetryAfter(), policy, limit)
	}
	if a := l.Take(ann, now.Add(500*time.Millisecond)); !a.OK {
		t.Error("half a second later there is no token")
	}
	for i := range 8 { // five requests of ann's counted for the address, and a refused one; some tokens came back
		if a := l.Take(&Caller{Buyer: fmt.Sprint("other-", i), Address: ann.Address}, now); !a.OK {
			if policy, _ := a.Headers(); policy[0] != `"address";q=8;w=1` {
				t.Errorf("refused by %s", policy)
			}
			break
		} else if i == 7 {
			t.Error("the address is not limited")
		}
	}
	if a := l.Take(&Caller{Checkout: true, Address: ann.Address}, now); !a.OK {
		t.Error("the checkout is limited")
	}
	if a := l.Take(&Caller{Buyer: "bob", Address: netip.MustParseAddr("198.51.100.8")}, now); !a.OK {
		t.Error("another address is limited")
	}
	if a := (&Limits{}).Take(ann, now); !a.OK || a.Scarce() {
		t.Error("without limits somebody is limited")
	}
}

// Whoever has an IPv6 address has the network of 2^64 around it.
func TestAddressesOfOneNetworkShareALimit(t *testing.T) {
	key := func(a string) string { return addressKey(netip.MustParseAddr(a)) }
	if key("2001:db8::1") != key("2001:db8::ffff:1") || key("2001:db8::1") == key("2001:db8:0:1::1") || key("198.51.100.7") == key("198.51.100.8") {
		t.Error("networks are told apart wrongly")
	}
}

// However many callers come, only so many are remembered.
func TestLimitsForget(t *testing.T) {
	l := NewLimit("buyer", Rate{PerSecond: 1, Burst: 1})
	for i := range 2 * limitKeys {
		l.Take(fmt.Sprint(i), time.Now())
	}
	n := 0
	for _, s := range l.shards {
		n += s.Len()
	}
	if n > limitKeys {
		t.Errorf("%d callers are remembered", n)
	}
}
