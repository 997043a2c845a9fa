package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"
)

// httpClient gives up sooner than a reserver does. Every request has a connection of its own: on one that broke while idle, Go
// would repeat the request by itself, unseen by the history.
var httpClient = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// crowd is the shoppers and the checkout of a round, and what they were told.
type crowd struct {
	now       func() int64
	reservers []*pod
	limit     int

	mu      sync.Mutex
	calls   []call
	decided int      // calls whose outcome is known
	known   []call   // claims that were answered with a reservation
	untyped []string // answers that are none of the API's
}

const (
	budget   = 150 // calls of known outcome in a round, before the last claims
	attempts = 4   // of a call whose outcome is unknown
	together = 250 * time.Millisecond
)

// client plays one client until the context ends or the budget is used up. Most calls are claims; the others are about
// reservations that anybody was told of, whatever became of them.
func (c *crowd) client(ctx context.Context, number int, rng *rand.Rand, every time.Duration) {
	for {
		wait := within(rng, 2*every)
		if rng.IntN(3) > 0 { // click together with others
			wait += together - time.Duration(c.now()+wait.Nanoseconds())%together
		}
		if !pause(ctx, wait) {
			return
		}
		c.mu.Lock()
		enough, known := c.decided >= budget, call{}
		if n := len(c.known); n > 0 {
			known = c.known[max(0, n-1-rng.IntN(min(n, 6)))] // the recent ones
		}
		c.mu.Unlock()
		if enough {
			return
		}
		about := call{Client: number, Reservation: known.Reservation}
		switch what := rng.IntN(100); {
		case what < 50 || known.Reservation == "":
			about = call{Client: number, Do: "reserve", Buyer: fmt.Sprintf("buyer-%d", rng.IntN(20)), Quantity: 1 + rng.IntN(c.limit)}
			if rng.IntN(2) == 0 {
				about.Key = fmt.Sprintf("key-%d-%d", number, rng.Uint32())
			}
		case what < 55 && known.Key != "": // the same again, long after, or another quantity under its key
			about = known
			about.Client, about.Reservation, about.Quantity = number, "", max(1, known.Quantity-rng.IntN(2))
		case what < 67:
			about.Do, about.Payment = "confirm", "pay-"+short(known.Reservation)
			if rng.IntN(8) == 0 {
				about.Payment = fmt.Sprint("pay-", rng.IntN(3)) // another one, or one that was used before
			}
		case what < 82:
			about.Do = "release"
			if rng.IntN(2) == 0 {
				about.Buyer = known.Buyer
			}
		case what < 92:
			about.Do, about.Restock = "refund", rng.IntN(4) > 0
		default:
			about.Do = "read"
		}
		if done := c.insist(ctx, about, rng); done.Answer == "granted" && rng.IntN(3) == 0 { // changes his mind, so that stock flows
			c.insist(ctx, call{Client: number, Do: "release", Buyer: done.Buyer, Reservation: done.Reservation}, rng)
		}
	}
}

// insist makes a call, again after an unknown outcome, each time at any reserver.
func (c *crowd) insist(ctx context.Context, about call, rng *rand.Rand) call {
	for i := 0; ; i++ {
		done := c.do(ctx, about, rng.IntN(len(c.reservers)))
		if answered := !done.undecided() && done.Answer != "refused"; answered || i == attempts || !pause(ctx, 100*time.Millisecond+within(rng, 400*time.Millisecond)) {
			return done
		}
	}
}

// do makes one call and records it.
func (c *crowd) do(ctx context.Context, about call, pod int) call {
	method, where, body := "POST", "/v1/reservations", ""
	switch about.Do {
	case "reserve":
		body = fmt.Sprintf(`{"quantity":%d}`, about.Quantity)
	case "read":
		method, where = "GET", where+"/"+about.Reservation
	case "release":
		method, where = "DELETE", where+"/"+about.Reservation
	case "confirm":
		where, body = where+"/"+about.Reservation+"/confirm", fmt.Sprintf(`{"paymentId":%q}`, about.Payment)
	case "refund":
		where, body = where+"/"+about.Reservation+"/refund", fmt.Sprintf(`{"restock":%t}`, about.Restock)
	}
	request, err := http.NewRequestWithContext(context.WithoutCancel(ctx), method, "http://"+c.reservers[pod].api+where, strings.NewReader(body))
	if err != nil {
		panic(err) // the URL is made of nothing but ids
	}
	if about.Buyer != "" {
		request.Header.Set("X-Buyer-Id", about.Buyer)
	}
	if about.Key != "" {
		request.Header.Set("Idempotency-Key", about.Key)
	}
	about.Pod, about.Began = pod, c.now()
	status, text, err := send(request)
	about.Ended = c.now()
	problem := ""
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		about.Answer = "refused"
	case err != nil:
		about.Answer = "lost"
	default:
		problem = about.read(status, text)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if problem != "" {
		c.untyped = append(c.untyped, problem+": "+about.String())
	}
	c.calls = append(c.calls, about)
	if !about.undecided() && about.Answer != "refused" {
		c.decided++
	}
	if about.told() {
		c.known = append(c.known, about)
	}
	return about
}

func send(request *http.Request) (status int, body []byte, err error) {
	if request.Header.Get("X-Buyer-Id") == "" {
		request.Header.Set("Authorization", "Bearer "+theKeys.Current.CheckoutToken)
	}
	answer, err := httpClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, answer.Body.Close()) }()
	body, err = io.ReadAll(answer.Body)
	return answer.StatusCode, body, err
}

// read takes an answer apart; it says what is wrong with one that is none of the API's.
func (c *call) read(status int, body []byte) (problem string) {
	var answer struct {
		ID, State string
		Quantity  int
		Type      string
	}
	if err := json.NewDecoder(bytes.NewReader(body)).Decode(&answer); err != nil {
		c.Answer = "lost"
		return fmt.Sprintf("status %d, not JSON: %.80q", status, body)
	}
	switch {
	case status < 300 && answer.State != "" && (c.Reservation == "" || c.Reservation == answer.ID):
		c.Answer, c.Reservation = strings.ToLower(answer.State), answer.ID
		if c.Do == "reserve" && status == http.StatusCreated {
			c.Answer = "granted"
		}
	case status >= 400 && answer.Type != "":
		c.Answer = path.Base(answer.Type)
	default:
		c.Answer = "lost"
		return fmt.Sprintf("status %d, of no known type: %.80q", status, body)
	}
	if (status >= 500) != (c.Answer == "busy") {
		return fmt.Sprintf("status %d with %s", status, c.Answer)
	}
	return ""
}
