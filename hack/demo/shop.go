package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// report is one line of what the shop prints, as JSON, for "demo run" to read.
type report struct {
	Step    string         `json:"step"`
	Text    string         `json:"text"`
	Answers []answerReport `json:"answers,omitempty"`
	Seconds float64        `json:"seconds,omitempty"`
	Held    int            `json:"held,omitempty"`
	Again   int64          `json:"again,omitempty"`
	// Skew is the time from the start to the first grant, by the database's clock.
	SkewMS  float64 `json:"skewMs,omitempty"`
	Failure string  `json:"failure,omitempty"`
}

type answerReport struct {
	Kind  string  `json:"kind"`
	Count int     `json:"count"`
	P50   float64 `json:"p50Ms"`
	P99   float64 `json:"p99Ms"`
	Max   float64 `json:"maxMs"`
}

// reservation is what the API answers.
type reservation struct {
	ID        string    `json:"id"`
	State     string    `json:"state"`
	GrantedAt time.Time `json:"grantedAt"`
	ExpiresAt time.Time `json:"expiresAt"`
	buyer     string
}

type stock struct {
	Phase     string    `json:"phase"`
	Available int64     `json:"available"`
	StartsAt  time.Time `json:"startsAt"`
	Now       time.Time `json:"now"`
}

type shopper struct {
	url     string
	client  *http.Client
	retries int
	again   atomic.Int64 // clicks that were tried again
}

// shop plays the shoppers of a sale and its checkout, and prints a report a step.
func shop(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("demo shop", flag.ExitOnError)
	url := flags.String("url", "", "the sale's API")
	clicks := flags.Int("clicks", 100_000, "buyers who click once each")
	connections := flags.Int("connections", 256, "connections to click over")
	lead := flags.Duration("lead", 2*time.Second, "how long before the start the first buyer clicks")
	units := flags.Int("units", 5, "units that must be sold")
	retries := flags.Int("retries", 60, "how often a buyer clicks again, a second later, after a 503 or a broken connection")
	if err := flags.Parse(args); err != nil {
		return err
	}
	s := &shopper{url: *url, retries: *retries, client: &http.Client{Timeout: 30 * time.Second,
		Transport: &http.Transport{MaxIdleConns: *connections, MaxIdleConnsPerHost: *connections, MaxConnsPerHost: *connections}}}
	out := json.NewEncoder(os.Stdout)
	tell := func(r report) error { return out.Encode(r) }
	if err := s.play(ctx, *clicks, *connections, *units, *lead, tell); err != nil {
		_ = tell(report{Step: "failed", Failure: err.Error()})
		return err
	}
	return nil
}

func (s *shopper) play(ctx context.Context, clicks, connections, units int, lead time.Duration, tell func(report) error) error {
	start, err := s.waitForStart(ctx, lead)
	if err != nil {
		return err
	}
	crowd := s.click(ctx, clicks, connections, units)
	held := crowd.held
	r := report{Step: "clicks", Answers: crowd.answers(), Seconds: crowd.seconds, Held: len(held), Again: s.again.Load(),
		Text: fmt.Sprintf("%d buyers clicked in %.1f s, the first %v before the start", clicks, crowd.seconds, lead)}
	if len(held) > 0 {
		r.SkewMS = float64(earliest(held).Sub(start)) / float64(time.Millisecond)
	}
	if err := tell(r); err != nil {
		return err
	}
	switch {
	case len(held) < units:
		return fmt.Errorf("%d buyers got a reservation, want %d", len(held), units)
	case earliest(held).Before(start):
		return fmt.Errorf("a reservation was granted at %v, before the start at %v", earliest(held), start)
	case crowd.untyped > 0:
		return fmt.Errorf("%d answers were errors or of no known type, the first: %s", crowd.untyped, crowd.firstError)
	case crowd.payError != nil:
		return crowd.payError
	}
	walker, more := held[units-1], held[units:]
	if err := tell(report{Step: "paid", Text: fmt.Sprintf("%d winners paid after %v; %s walks away", units-1, payAfter, walker.buyer)}); err != nil {
		return err
	}
	lucky, back, err := s.afterTheWalk(ctx, walker, more)
	if err != nil {
		return err
	}
	late := back.Sub(walker.ExpiresAt)
	if err := tell(report{Step: "returned", Text: fmt.Sprintf("the unit of %s came back %.2f s after its hold ended", walker.buyer, late.Seconds())}); err != nil {
		return err
	}
	if late < 0 || late > 2*time.Second {
		return fmt.Errorf("the unit came back %v after the hold ended, want between 0 and 2 s", late)
	}
	return tell(report{Step: "sold", Text: lucky.buyer + " got it, and paid"})
}

func earliest(held []*reservation) time.Time {
	return slices.MinFunc(held, func(a, b *reservation) int { return a.GrantedAt.Compare(b.GrantedAt) }).GrantedAt
}

// afterTheWalk sees the walker's unit come back, and go to somebody who pays: one of the crowd if it still clicks, else
// a latecomer.
func (s *shopper) afterTheWalk(ctx context.Context, walker *reservation, more []*reservation) (lucky *reservation, back time.Time, err error) {
	switch len(more) {
	case 0:
		if back, err = s.waitForUnit(ctx, walker); err != nil {
			return nil, back, err
		}
		kind, lucky := s.reserve(ctx, "latecomer")
		if kind != "held" {
			return nil, back, fmt.Errorf("the latecomer was answered %s, want held", kind)
		}
		return lucky, back, s.confirm(ctx, lucky)
	case 1:
		return more[0], more[0].GrantedAt, nil
	}
	return nil, back, fmt.Errorf("%d buyers too many got a reservation", len(more)-1)
}

// waitForStart waits until lead before the start, by the database's clock.
func (s *shopper) waitForStart(ctx context.Context, lead time.Duration) (time.Time, error) {
	for {
		st, err := s.stock(ctx)
		if err == nil {
			wait := st.StartsAt.Sub(st.Now) - lead
			if wait <= 0 {
				return st.StartsAt, nil
			}
			time.Sleep(min(wait, time.Second))
			continue
		}
		if ctx.Err() != nil {
			return time.Time{}, fmt.Errorf("the API did not answer: %w", err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// waitForUnit waits until the stock shows a unit that nobody holds, and gives the database's time when it was seen.
func (s *shopper) waitForUnit(ctx context.Context, from *reservation) (time.Time, error) {
	for deadline := time.Now().Add(time.Until(from.ExpiresAt) + time.Minute); time.Now().Before(deadline); {
		if st, err := s.stock(ctx); err == nil && st.Available > 0 {
			return st.Now, nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return time.Time{}, errors.New("the unit that was not paid did not come back")
}

type crowd struct {
	mu         sync.Mutex
	times      map[string][]time.Duration
	held       []*reservation
	untyped    int
	firstError string
	payError   error
	seconds    float64
}

// payAfter is how long a buyer takes to pay.
const payAfter = 2 * time.Second

// click lets n distinct buyers click once each, as fast as the connections allow. Who gets a reservation pays a moment
// later, all but the one who got the last of the units.
func (s *shopper) click(ctx context.Context, n, connections, units int) *crowd {
	c := &crowd{times: map[string][]time.Duration{}}
	buyers := make(chan int, connections)
	began := time.Now()
	var wg, paying sync.WaitGroup
	for range connections {
		wg.Go(func() {
			own := map[string][]time.Duration{}
			for b := range buyers {
				sent := time.Now()
				kind, res := s.reserve(ctx, fmt.Sprintf("buyer-%06d", b))
				took := time.Since(sent)
				if text, isError := strings.CutPrefix(kind, "error: "); isError {
					kind = "error"
					c.mu.Lock()
					c.untyped++
					if c.firstError == "" {
						c.firstError = text
					}
					c.mu.Unlock()
				}
				own[kind] = append(own[kind], took)
				if res == nil {
					continue
				}
				c.mu.Lock()
				c.held = append(c.held, res)
				pays := len(c.held) != units
				c.mu.Unlock()
				if pays {
					paying.Go(func() {
						time.Sleep(payAfter)
						if err := s.confirm(ctx, res); err != nil {
							c.mu.Lock()
							defer c.mu.Unlock()
							c.payError = err
						}
					})
				}
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			for kind, times := range own {
				c.times[kind] = append(c.times[kind], times...)
			}
		})
	}
	for b := range n {
		buyers <- b
	}
	close(buyers)
	wg.Wait()
	c.seconds = time.Since(began).Seconds()
	paying.Wait()
	return c
}

func (c *crowd) answers() []answerReport {
	kinds := []string{"held", "sold-out", "all-held", "not-open", "busy", "error"}
	for kind := range c.times {
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	var all []answerReport
	for _, kind := range kinds {
		t := c.times[kind]
		if len(t) == 0 {
			all = append(all, answerReport{Kind: kind})
			continue
		}
		slices.Sort(t)
		all = append(all, answerReport{kind, len(t), ms(t[len(t)/2]), ms(t[len(t)*99/100]), ms(t[len(t)-1])})
	}
	return all
}

// reserve clicks for a buyer, and gives "held" and the reservation, the problem's type, or "error: ...".
func (s *shopper) reserve(ctx context.Context, buyer string) (kind string, res *reservation) {
	for try := 0; ; try++ {
		status, body, err := s.call(ctx, http.MethodPost, "/v1/reservations", buyer, `{"quantity":1}`)
		again := err != nil || status == http.StatusServiceUnavailable
		if again && try < s.retries {
			s.again.Add(1)
			time.Sleep(time.Second) // as Retry-After says
			continue
		}
		if err != nil {
			return "error: " + err.Error(), nil
		}
		if status == http.StatusCreated || status == http.StatusOK {
			res = &reservation{buyer: buyer}
			if err := json.Unmarshal(body, res); err != nil || res.State != "HELD" {
				return fmt.Sprintf("error: status %d with body %s", status, body), nil
			}
			return "held", res
		}
		var problem struct {
			Type string `json:"type"`
		}
		slug, known := "", false
		if json.Unmarshal(body, &problem) == nil {
			slug, known = strings.CutPrefix(problem.Type, "https://flashsale.dev/problems/")
		}
		if !known {
			return fmt.Sprintf("error: status %d with body %s", status, body), nil
		}
		return slug, nil
	}
}

func (s *shopper) confirm(ctx context.Context, r *reservation) error {
	for try := 0; ; try++ {
		status, body, err := s.call(ctx, http.MethodPost, "/v1/reservations/"+r.ID+"/confirm", "", `{"paymentId":"payment-of-`+r.buyer+`"}`)
		if err == nil && status == http.StatusOK {
			return nil
		}
		if try == s.retries {
			return fmt.Errorf("confirming the reservation of %s: status %d, %s, error %w", r.buyer, status, body, err)
		}
		time.Sleep(time.Second)
	}
}

func (s *shopper) stock(ctx context.Context) (*stock, error) {
	status, body, err := s.call(ctx, http.MethodGet, "/v1/stock", "", "")
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("the stock was answered with status %d", status)
	}
	st := &stock{}
	return st, json.Unmarshal(body, st)
}

func (s *shopper) call(ctx context.Context, method, path, buyer, body string) (int, []byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.url+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return 0, nil, err
	}
	if buyer != "" { // as the shop's gateway says
		request.Header.Set("X-Buyer-Id", buyer)
	} else {
		request.Header.Set("Authorization", "Bearer "+os.Getenv("CHECKOUT_TOKEN"))
	}
	answer, err := s.client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	b, err := io.ReadAll(answer.Body)
	return answer.StatusCode, b, err
}
